"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: true,
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };

  function colours() {
    const style = getComputedStyle(document.documentElement);
    return (name) => style.getPropertyValue("--" + name).trim();
  }

  // Neighbouring messages get two shades, so that one ends visibly where the next begins.
  function paint(trace, colour) {
    const role = trace.meta.role;
    if (trace.type === "bar") {
      const shades = role === "message" ? [colour("message"), colour("message-2")] : [colour(role)];
      let first = 0;  // of its row
      const shade = (y, place) => {
        if (y !== trace.y[place - 1]) first = place;
        return shades[(place - first) % shades.length];
      };
      const critical = trace.meta.critical;
      const width = critical ? critical.map((is) => (is ? 1.5 : 0)) : 0;
      trace.marker = { color: trace.y.map(shade), line: { width, color: colour("text") } };
    } else {
      trace.line.color = colour(role);
      if (trace.marker) trace.marker.color = colour(role);
    }
  }

  function dress(figure) {
    const colour = colours();
    const { data, layout } = figure;
    data.forEach((trace) => paint(trace, colour));
    const axis = { gridcolor: colour("rule"), linecolor: colour("rule"), automargin: false };
    Object.assign(layout, {
      paper_bgcolor: colour("page"),
      plot_bgcolor: colour("page"),
      font: { family: "system-ui, sans-serif", size: 12, color: colour("text") },
      hoverlabel: {
        bgcolor: colour("shade"), bordercolor: colour("quiet"), align: "left",
        font: { color: colour("text"), family: "system-ui, sans-serif" },
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("quiet"), activecolor: colour("text") },
    });
    Object.assign(layout.xaxis, axis);
    Object.assign(layout.yaxis, axis);
    (layout.shapes || []).forEach((shape) => { shape.line.color = colour("text"); });
    (layout.annotations || []).forEach((heading) => { heading.bgcolor = colour("page"); });
    if (touch.matches) layout.dragmode = false;  // a finger scrolls the page; the buttons zoom
  }

  function draw() {
    return Promise.all(Object.entries(figures).map(([name, figure]) => {
      dress(figure);
      return Plotly.react(name, figure.data, figure.layout, config);
    }));
  }

  draw().then(() => { document.documentElement.dataset.drawn = "yes"; });
  dark.addEventListener("change", draw);
})();
