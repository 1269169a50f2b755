// Plotly neither wraps a title nor moves a legend out of its way: on a narrow screen both are done here.
addEventListener("load", () => {
  if (innerWidth >= 600 || !window.Plotly) return;
  const wrapped = (text, width) => text.split(" ").reduce((lines, word) => {
    const last = lines.at(-1);
    return last && (last + " " + word).length <= width ? [...lines.slice(0, -1), last + " " + word] : [...lines, word];
  }, []).join("<br>");
  for (const figure of document.querySelectorAll(".plotly-graph-div")) {
    const { title, margin, legend, height } = figure.layout, text = title?.text ?? "";
    const lines = wrapped(text, Math.floor((innerWidth - 40) / 8)).split("<br>");
    const changes = { "title.text": lines.join("<br>"), "title.font.size": 14 };
    if (lines.length > 1) changes["margin.t"] = (margin?.t ?? 56) + 17 * (lines.length - 1);
    if (figure.querySelector(".legend") && (legend?.y ?? 1) > 0)
      Object.assign(changes, { "legend.orientation": "h", "legend.x": 0, "legend.xanchor": "left", "legend.y": -0.25,
        "legend.yanchor": "top", height: (height ?? 380) + 24 * figure.querySelectorAll(".legend .traces").length });
    Plotly.relayout(figure, changes);
  }
});
