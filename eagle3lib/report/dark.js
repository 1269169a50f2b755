// Who reads in the dark gets dark figures: ground, letters and grid change, the series keep their
// colours, which are told apart by the colour-blind on both grounds. Paper stays light.
addEventListener("load", () => {
  if (!window.Plotly || Plotly.undrawn) return;
  const ground = "#16191c", letters = "#e4e6e8", grid = "#3a4249", black = "#333333";
  // What plotly's white template is drawn with.
  const inDark = { white: ground, "#2a3f5f": letters, "#ebf0f8": grid, "#dfe8f3": grid, "#c8d4e3": grid };
  const darkened = template => {
    const made = JSON.parse(JSON.stringify(template),
      (key, value) => typeof value === "string" ? inDark[value.toLowerCase()] ?? value : value);
    // An open menu's chosen line is nearly white whatever the template: its letters stay dark.
    made.layout = { ...made.layout, paper_bgcolor: ground, plot_bgcolor: ground,
      updatemenudefaults: { bgcolor: "#c9d1d8", bordercolor: grid, font: { color: "#1a1a1a" } } };
    return made;
  };
  const isBlack = trace => String(trace.marker?.color).toLowerCase() === black;
  const whites = new Map();
  const draw = dark => {
    for (const figure of document.querySelectorAll(".js-plotly-plot")) {
      if (!whites.has(figure)) whites.set(figure, figure.layout.template ?? {});
      const white = whites.get(figure), template = dark ? darkened(white) : white;
      const edged = figure.data.flatMap((trace, i) => isBlack(trace) ? [i] : []);
      if (edged.length) // black bars would be lost on a dark ground
        Plotly.restyle(figure, { "marker.line.color": letters, "marker.line.width": dark ? 1 : 0 }, edged);
      Plotly.relayout(figure, { template });
    }
  };
  const asked = matchMedia("(prefers-color-scheme: dark)");
  if (asked.matches) draw(true);
  asked.addEventListener("change", () => draw(asked.matches));
  addEventListener("beforeprint", () => draw(false));
  addEventListener("afterprint", () => draw(asked.matches));
});
