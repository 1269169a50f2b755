// Until plotly's own library takes this place: where it cannot be loaded, words stand for a figure.
window.Plotly = {
  undrawn: true,
  newPlot: id => {
    const place = document.getElementById(id), words = document.createElement("p");
    const told = place.closest("[aria-label]")?.getAttribute("aria-label") ?? "";
    words.textContent = `This figure needs the network: plotly's library could not be loaded. ${told}`;
    place.classList.remove("plotly-graph-div");
    place.style.height = place.parentElement.style.height = "auto";
    place.replaceChildren(words);
    return new Promise(() => {});
  },
};
