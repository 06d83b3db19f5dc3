"use strict";
// Draws the charts of the page from the JSON in #data. One x axis (steps, tokens or hours) and one zoom serve all.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const place = document.getElementById("charts");
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const several = data.runs.length > 1;
  const EXPANDED = 2; // of uPlot: a gap goes on where the curve has no point of its own
  const MANY = 10; // entries of a chart's values from which they scroll
  let axis = "step", range = 1, plots = [], isZooming = false;

  // ------------------------------------------------------------------ numbers for people

  const SUFFIXES = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];
  const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const digits = (v, n) => Number(v.toPrecision(n)).toString();
  const scaled = (v, table, gap) => {
    const found = table.find(([factor]) => Math.abs(v) >= factor);
    return found ? digits(v / found[0], 4) + gap + found[1] : digits(v, 4);
  };
  const POWERS = Array.from({ length: 50 }, (_, i) => 2 ** i); // distances of ticks in bytes
  const FORMS = {
    number: v => Math.abs(v) >= 1e5 || (v && Math.abs(v) < 1e-3) ? v.toExponential(2) : digits(v, 5),
    count: v => scaled(v, SUFFIXES, ""),
    percent: v => digits(v, 4) + "%",
    share: v => digits(100 * v, 4) + "%",
    bytes: v => scaled(v, BYTES, " "),
    seconds: v => v && v < 0.1 ? digits(1e3 * v, 3) + " ms" : digits(v, 4) + " s",
    small: v => v === 0 ? "0" : v.toExponential(2).replace(/\.?0+e/, "e"),
  };
  const AXES = {
    step: v => v >= 1e5 ? scaled(v, SUFFIXES, "") : String(v),
    tokens: v => scaled(v, SUFFIXES, ""),
    hours: v => v === 0 ? "0" : v < 1 / 60 ? digits(3600 * v, 3) + " s" : v < 1 ? digits(60 * v, 3) + " min" : digits(v, 3) + " h",
  };

  // ------------------------------------------------------------------ from steps to the x axis

  function at(run, step) {
    const { step: steps, [axis]: values } = data.runs[run].axes;
    if (axis === "step") return step;
    if (!steps.length) return null;
    let low = 0, high = steps.length - 1;
    if (step <= steps[0]) return values[0];
    if (step >= steps[high]) return values[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    return values[low] + (values[high] - values[low]) * (step - steps[low]) / (steps[high] - steps[low]);
  }

  /** Where a mark is: that of a resume in time is when its launch began. */
  const whereIs = (run, mark) => axis === "hours" && mark.hours !== undefined ? mark.hours : at(run, mark.step);

  /** Columns for uPlot: ascending x without repetition, which its join needs; null where no launch was running. */
  function columns(series) {
    const x = [], y = [];
    const stops = axis === "hours" ? data.runs[series.run].marks.filter(mark => mark.kind === "resume") : [];
    series.x.forEach((step, i) => {
      const value = at(series.run, step), last = x[x.length - 1];
      if (value === null) return;
      if (x.length && value <= last) { y[y.length - 1] = series.y[i]; return; }
      if (i && stops.some(mark => series.x[i - 1] <= mark.step && mark.step < step)) {
        x.push((last + value) / 2);
        y.push(null);
      }
      x.push(value);
      y.push(series.y[i]);
    });
    return [x, y];
  }

  // ------------------------------------------------------------------ one chart

  /** A run's color, or that of a line among others; of many, as for layers, a color between two hues. */
  function hue(series) {
    if (series.place === undefined) return color(`--run-${series.run % 8}`);
    if (series.places <= 8) return color(`--run-${series.place}`);
    return `hsl(${250 - 230 * series.place / (series.places - 1)} 65% ${color("--many")})`;
  }

  function line(series, u) {
    const stroke = hue(series);
    return {
      stroke: series.faint ? stroke + "70" : stroke,
      width: series.faint ? 1 : 1.8,
      dash: series.dashed ? [5, 4] : undefined,
      points: { show: series.dots, size: 5, fill: stroke },
    };
  }

  const MARKS = { resume: "--soft", rise: "--bad", incident: "--watch", "not finite": "--bad" };

  /** Resumes as dashed lines in every chart; rises and the like as triangles at the top of the loss. */
  function drawMarks(u, chart) {
    const { ctx, bbox } = u, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    data.runs.forEach((run, number) => {
      for (const mark of run.marks) {
        const value = whereIs(number, mark), isLine = mark.kind === "resume";
        if (value === null || (!isLine && !chart.wide)) continue;
        const x = u.valToPos(value, "x", true);
        ctx.beginPath();
        if (isLine) {
          ctx.strokeStyle = several ? color(`--run-${number % 8}`) : color(MARKS.resume);
          ctx.globalAlpha = 0.65;
          ctx.lineWidth = ratio;
          ctx.setLineDash([3 * ratio, 3 * ratio]);
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
          ctx.setLineDash([]);
        } else {
          ctx.globalAlpha = 1;
          ctx.fillStyle = color(MARKS[mark.kind]);
          ctx.moveTo(x - 5 * ratio, bbox.top);
          ctx.lineTo(x + 5 * ratio, bbox.top);
          ctx.lineTo(x, bbox.top + 8 * ratio);
          ctx.fill();
        }
      }
    });
    ctx.restore();
  }

  function nearest(column, i) {
    for (let d = 0; d < column.length; d++) {
      if (column[i - d] != null) return i - d;
      if (column[i + d] != null) return i + d;
    }
    return null;
  }

  function showValues(u, chart, texts) {
    chart.series.forEach((series, number) => {
      if (!texts[number]) return;
      const column = u.data[number + 1], hovered = u.cursor.idxs && u.cursor.idxs[number + 1];
      const i = u.cursor.left >= 0 && hovered != null ? hovered : nearest(column, column.length - 1);
      texts[number].textContent = i == null ? "" : FORMS[chart.unit](column[i]);
    });
    const where = u.cursor.left >= 0 && u.cursor.idx != null ? AXES[axis](u.data[0][u.cursor.idx]) : "";
    texts.where.textContent = where && `${axis === "hours" ? "after" : "at"} ${where}`;
  }

  function frame(chart) {
    const card = document.createElement("div");
    card.className = chart.wide ? "chart wide" : "chart";
    const head = card.appendChild(document.createElement("h3"));
    head.append(chart.title);
    const note = head.appendChild(document.createElement("small"));
    note.textContent = chart.note;
    if (chart.may_be_log) {
      const button = head.appendChild(document.createElement("button"));
      button.textContent = "log";
      button.title = "logarithmic y axis";
      button.className = chart.log ? "on" : "";
      button.onclick = () => { chart.log = !chart.log; draw(); };
    }
    const values = card.appendChild(document.createElement("div")), texts = [];
    values.className = "values";
    let entry, run;
    chart.series.forEach((series, number) => {
      if (series.faint) return;
      const isNew = series.place !== undefined || series.run !== run; // else it follows on the same line
      if (isNew) entry = values.appendChild(document.createElement("span"));
      const swatch = entry.appendChild(document.createElement("i"));
      swatch.style.borderColor = hue(series);
      if (series.dashed) swatch.className = "dashed";
      const name = series.place === undefined && several && isNew ? data.runs[series.run].name : "";
      entry.append([name, series.label].filter(Boolean).join(" · "));
      texts[number] = entry.appendChild(document.createElement("b"));
      run = series.run;
    });
    texts.where = values.appendChild(document.createElement("span"));
    if (values.children.length > MANY) values.classList.add("many");
    return { card, texts };
  }

  function plot(chart, full) {
    const { card, texts } = frame(chart);
    place.appendChild(card);
    const box = card.appendChild(document.createElement("div"));
    const isLog = chart.log && chart.series.every(series => series.y.every(value => value > 0));
    const size = () => ({ width: Math.max(200, card.clientWidth - 24), height: chart.wide ? Math.min(360, 200 + card.clientWidth / 6) : 190 });
    const axisLook = { stroke: color("--soft"), font: "12px system-ui, sans-serif", ticks: { stroke: color("--line"), width: 1 },
      grid: { stroke: color("--grid"), width: 1 } };
    const u = new uPlot({
      ...size(),
      legend: { show: false },
      padding: [10, 14, 0, 0],
      cursor: {
        sync: { key: "keel", scales: ["x", null] },
        drag: { x: true, y: false },
        dataIdx: (u, number, i) => nearest(u.data[number], i),
        points: { size: 7 },
        bind: { dblclick: u => () => u.setScale("x", extent(1)) },
        y: false,
      },
      scales: { x: { time: false, auto: false, ...full }, y: { distr: isLog ? 3 : 1 } },
      axes: [
        { ...axisLook, space: 64, size: 32, values: (u, ticks) => ticks.map(AXES[axis]) },
        { ...axisLook, size: 70, space: 32, incrs: chart.unit === "bytes" ? POWERS : undefined, values: (u, ticks) => ticks.map(tick => tick == null ? "" : FORMS[chart.unit](tick)) },
      ],
      series: [{}, ...chart.series.map(series => line(series))],
      hooks: {
        draw: [u => drawMarks(u, chart)],
        setCursor: [u => showValues(u, chart, texts)],
        setScale: [(u, key) => { if (key === "x") zoomOthers(u); }],
      },
    }, uPlot.join(chart.series.map(columns), chart.series.map(() => [EXPANDED, EXPANDED])), box);
    showValues(u, chart, texts);
    touch(u);
    new ResizeObserver(() => { const next = size(); if (next.width !== u.width) u.setSize(next); }).observe(card);
    return u;
  }

  function zoomOthers(u) {
    if (isZooming) return;
    isZooming = true;
    const { min, max } = u.scales.x;
    if (min != null) for (const other of plots) if (other !== u) other.setScale("x", { min, max });
    isZooming = false;
  }

  /** A finger that slides over a chart reads values in all of them; up and down it scrolls the page. */
  function touch(u) {
    u.over.style.touchAction = "pan-y";
    const read = event => {
      const { left, top } = u.over.getBoundingClientRect(), finger = event.touches[0];
      const x = u.posToVal(finger.clientX - left, "x");
      for (const other of plots) other.setCursor({ left: other.valToPos(x, "x"), top: finger.clientY - top });
    };
    u.over.addEventListener("touchstart", read, { passive: true });
    u.over.addEventListener("touchmove", read, { passive: true });
  }

  // ------------------------------------------------------------------ all charts

  /** The last part of the range of x over all curves. */
  function extent(part) {
    let low = Infinity, high = -Infinity;
    for (const chart of data.charts) for (const series of chart.series) {
      const [x] = columns(series);
      if (x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
    }
    return low < high ? { min: high - (high - low) * part, max: high } : { min: low - 1, max: high + 1 };
  }

  function draw() {
    for (const u of plots) u.destroy();
    place.replaceChildren();
    plots = [];
    isZooming = true;
    const full = extent(range);
    plots = data.charts.map(chart => plot(chart, full));
    isZooming = false;
  }

  for (const choice of document.querySelectorAll(".switch")) {
    choice.onclick = event => {
      if (event.target.tagName !== "BUTTON") return;
      for (const button of choice.children) button.classList.toggle("on", button === event.target);
      if (choice.dataset.choice === "axis") axis = event.target.value; else range = Number(event.target.value);
      draw();
    };
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
