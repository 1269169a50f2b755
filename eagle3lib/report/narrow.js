// Plotly neither wraps a title nor moves a legend out of its way: here it is done for a narrow screen.
addEventListener("load", () => {
  if (innerWidth >= 600 || !window.Plotly || Plotly.undrawn) return;
  const wrapped = (text, width) => text.split(" ").reduce((lines, word) => {
    const longer = `${lines.at(-1)} ${word}`;
    return lines.length && longer.length <= width ? [...lines.slice(0, -1), longer] : [...lines, word];
  }, []);
  for (const figure of document.querySelectorAll(".plotly-graph-div")) {
    const layout = figure.layout, changes = { "title.font.size": 14 };
    const lines = wrapped(layout.title?.text ?? "", Math.floor((innerWidth - 40) / 8));
    changes["title.text"] = lines.join("<br>");
    changes["margin.t"] = (layout.margin?.t ?? 56) + 17 * Math.max(0, lines.length - 1);
    for (const axis of Object.keys(layout).filter(name => /^[xy]axis\d*$/.test(name)))
      if (layout[axis].title?.text) changes[`${axis}.title.font.size`] = 12;
    const names = figure.querySelectorAll(".legend .traces").length;
    if (names && (layout.legend?.y ?? 1) > 0 && !layout.sliders) {
      changes.height = figure.offsetHeight + 22 * names;
      Object.assign(changes, { "legend.orientation": "v", "legend.x": 0, "legend.xanchor": "left",
        "legend.y": -0.28, "legend.yanchor": "top" });
      figure.style.height = figure.parentElement.style.height = `${changes.height}px`;
    }
    // Of words in cells: scrolled sideways rather than written over each other.
    if (layout.meta?.least_width) {
      changes.width = layout.meta.least_width;
      figure.style.width = `${changes.width}px`;
    }
    Plotly.relayout(figure, changes);
  }
});
