// Draws the charts of a report; asks the network for nothing.
(function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const PRINTED = { ink: "#1d232b", grid: "#e6e9ee", width: 680 };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  // A finger scrolls the page; on a chart it would be caught by the drag that zooms.
  const touched = window.matchMedia("(pointer: coarse)").matches;
  const config = {
    displaylogo: false,
    // Without a mouse it would lie over the chart for good.
    displayModeBar: window.matchMedia("(hover: hover)").matches ? "hover" : false,
    // What sends a chart to plotly's cloud has no place in a page of the user's data.
    modeBarButtonsToRemove: ["sendChartToCloud", "lasso2d", "select2d", "autoScale2d"],
    plotlyServerURL: "",
    responsive: true,
  };

  function axes(figure) {
    return Object.keys(figure.layout).filter((name) => /^[xy]axis/.test(name));
  }

  function look(figure, ink, grid) {
    const colours = { "font.color": ink, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
    colours["modebar.bgcolor"] = "rgba(0,0,0,0)";
    colours["modebar.color"] = "#8896ab";
    for (const name of axes(figure)) {
      colours[name + ".gridcolor"] = grid;
      colours[name + ".linecolor"] = grid;
    }
    return colours;
  }

  function ofPage(figure) {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(name).trim();
    return look(figure, value("--ink"), value("--grid"));
  }

  function each(act) {
    for (const [key, figure] of Object.entries(figures)) {
      act(document.getElementById("chart-" + key), figure);
    }
  }

  function draw(place, figure) {
    const layout = figure.layout;
    layout.font = { family: getComputedStyle(document.body).fontFamily, size: 12 };
    if (touched) {
      layout.dragmode = false;
      axes(figure).forEach((name) => { layout[name].fixedrange = true; });
    }
    const drawn = Plotly.newPlot(place, figure.data, layout, config);
    return drawn.then(() => Plotly.relayout(place, ofPage(figure)));
  }

  const drawn = [];
  each((place, figure) => drawn.push(draw(place, figure)));
  Promise.all(drawn).then(() => { document.documentElement.dataset.charts = "drawn"; });

  const again = () => each((place, figure) => Plotly.relayout(place, ofPage(figure)));
  dark.addEventListener("change", again);
  window.addEventListener("beforeprint", () => each((place, figure) => {
    Plotly.relayout(place, Object.assign(look(figure, PRINTED.ink, PRINTED.grid), { width: PRINTED.width }));
  }));
  window.addEventListener("afterprint", () => each((place, figure) => {
    Plotly.relayout(place, Object.assign(ofPage(figure), { width: null, autosize: true }));
  }));
})();
