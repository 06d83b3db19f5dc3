"use strict";
// Draws the charts of the page from the JSON in #data. One x axis (steps, tokens or hours) and one zoom serve all.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const place = document.getElementById("charts");
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const several = data.runs.length > 1;
  const EXPANDED = 2; // of uPlot: a gap goes on where the curve has no point of its own
  const MANY = 10; // entries of a chart's values from which they scroll
  const HUES = 12; // colors of runs in page.css; further runs repeat them with a dash
  const DASHES = [[], [9, 4], [9, 3, 2, 3], [4, 3]];
  const DOTTED = [2, 3]; // the second line of a run in a chart, such as its validation

  /** What the reader has chosen; the page's address keeps it. */
  const view = { axis: "step", last: 1, x: null, smooth: remembered(), hidden: new Set() };
  let plots = [];

  // ------------------------------------------------------------------ numbers for people

  const SUFFIXES = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];
  const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const digits = (v, n) => Math.abs(v) >= 1e15 ? v.toExponential(2) : Number(v.toPrecision(n)).toString();
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
    seconds: v => v && Math.abs(v) < 0.1 ? digits(1e3 * v, 3) + " ms" : digits(v, 4) + " s",
    small: v => v === 0 ? "0" : v.toExponential(2).replace(/\.?0+e/, "e"),
  };
  const AXES = {
    step: v => v >= 1e5 ? scaled(v, SUFFIXES, "") : digits(v, 7),
    tokens: v => scaled(v, SUFFIXES, ""),
    hours: v => v === 0 ? "0" : v < 1 / 60 ? digits(3600 * v, 3) + " s" : v < 1 ? digits(60 * v, 3) + " min" : digits(v, 3) + " h",
  };

  // ------------------------------------------------------------------ the view, in the page's address

  function remembered() {
    try { return Number(localStorage.getItem("keel.smooth") ?? 5); } catch { return 5; } // a browser may forbid it
  }

  const interval = text => {
    const found = (text ?? "").split("~").map(Number);
    return found.length === 2 && found[0] < found[1] ? found : null;
  };

  function readAddress() {
    const words = new URLSearchParams(location.hash.slice(1));
    const axis = words.get("axis"), smooth = Number(words.get("smooth") ?? view.smooth);
    view.axis = Object.hasOwn(AXES, axis) ? axis : "step";
    view.last = Number(words.get("last")) || 1;
    view.x = interval(words.get("x"));
    view.smooth = smooth >= 0 && smooth <= 50 ? smooth : 5;
    view.hidden = new Set(words.getAll("hide"));
    for (const chart of data.charts) {
      chart.y = interval(words.get(`y ${chart.title}`));
      chart.isLog = words.has(`log ${chart.title}`) ? words.get(`log ${chart.title}`) === "1" : chart.log;
      const name = words.get(`name ${chart.title}`);
      chart.name = chart.names.includes(name) ? name : chart.names[0];
    }
  }

  function writeAddress() {
    const words = new URLSearchParams();
    if (view.axis !== "step") words.set("axis", view.axis);
    if (view.last !== 1) words.set("last", view.last);
    if (view.x) words.set("x", view.x.map(v => digits(v, 7)).join("~"));
    words.set("smooth", view.smooth);
    for (const name of view.hidden) words.append("hide", name);
    for (const chart of data.charts) {
      if (chart.y) words.set(`y ${chart.title}`, chart.y.map(v => digits(v, 7)).join("~"));
      if (chart.isLog !== chart.log) words.set(`log ${chart.title}`, Number(chart.isLog));
      if (chart.name !== chart.names[0]) words.set(`name ${chart.title}`, chart.name);
    }
    history.replaceState(null, "", `#${words}`);
  }

  // ------------------------------------------------------------------ from steps to the x axis

  function at(run, step) {
    const { step: steps, [view.axis]: values } = data.runs[run].axes;
    if (view.axis === "step") return step;
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
  const whereIs = (run, mark) => view.axis === "hours" && mark.hours !== undefined ? mark.hours : at(run, mark.step);

  /** Columns for uPlot: ascending x without repetition, which its join needs; null where no launch was running. */
  function columns(run, steps, values) {
    const x = [], y = [];
    const stops = view.axis === "hours" ? data.runs[run].marks.filter(mark => mark.kind === "resume") : [];
    steps.forEach((step, i) => {
      const value = at(run, step), last = x[x.length - 1];
      if (value === null) return;
      if (x.length && value <= last) { y[y.length - 1] = values[i]; return; }
      if (i && stops.some(mark => steps[i - 1] <= mark.step && mark.step < step)) {
        x.push((last + value) / 2);
        y.push(null);
      }
      x.push(value);
      y.push(values[i]);
    });
    return [x, y];
  }

  /** Means over neighbouring points, each of a share of those in view; null if a mean would be of a single one. */
  function means([x, y], [low, high]) {
    const inView = x.filter((value, i) => y[i] !== null && value >= low && value <= high).length;
    const half = Math.floor(inView * view.smooth / 200);
    if (!half) return null;
    return [x, y.map((value, i) => {
      if (value === null) return null;
      let sum = 0, n = 0;
      for (let j = Math.max(0, i - half); j <= i + half && j < y.length; j++) if (y[j] !== null) { sum += y[j]; n++; }
      return sum / n;
    })];
  }

  /** The range of x in view. */
  function extent() {
    if (view.x) return view.x;
    let low = Infinity, high = -Infinity;
    for (const chart of data.charts) for (const series of chart.series) {
      if (!isShown(chart, series) || !series.x.length) continue;
      const first = at(series.run, series.x[0]), last = at(series.run, series.x[series.x.length - 1]);
      if (first !== null) { low = Math.min(low, first); high = Math.max(high, last); }
    }
    return low < high ? [high - (high - low) * view.last, high] : low === high ? [low - 1, high + 1] : [0, 1];
  }

  // ------------------------------------------------------------------ which lines, and how they look

  /** What hides a line: its run's name, or in a chart with a line for each name, that. */
  const keyOf = series => series.place === undefined ? data.runs[series.run].name : `name ${series.label}`;
  const isShown = (chart, series) => !view.hidden.has(data.runs[series.run].name) && !view.hidden.has(keyOf(series))
    && (!chart.names.length || series.label === chart.name);

  function toggle(key) {
    if (!view.hidden.delete(key)) view.hidden.add(key);
    draw();
  }

  /** A run's color. A name's, as of a layer, is between two hues: it is no run's. */
  function hue(series) {
    if (series.place === undefined) return color(`--run-${series.run % HUES}`);
    return `hsl(${Math.round(250 - 230 * series.place / Math.max(1, series.places - 1))} 65% ${color("--many")})`;
  }

  const dashOf = run => DASHES[Math.floor(run / HUES) % DASHES.length];
  const dash = series => series.dashed ? DOTTED : series.place === undefined ? dashOf(series.run) : [];

  const SVG = "http://www.w3.org/2000/svg";

  /** A short piece of a line. */
  function swatch(series) {
    const svg = document.createElementNS(SVG, "svg"), piece = svg.appendChild(document.createElementNS(SVG, "path"));
    svg.setAttribute("viewBox", "0 0 24 8");
    for (const [name, value] of Object.entries({ d: "M0 4H24", stroke: hue(series), "stroke-width": 3 })) piece.setAttribute(name, value);
    if (dash(series).length) piece.setAttribute("stroke-dasharray", dash(series).join(" "));
    return svg;
  }

  const faint = stroke => stroke.startsWith("#") ? `${stroke}58` : stroke.replace(")", " / 0.35)");

  // ------------------------------------------------------------------ one chart

  const MARKS = { resume: "--soft", stage: "--soft", spike: "--bad", incident: "--watch", "not finite": "--bad" };
  const isRunShown = run => !view.hidden.has(data.runs[run].name);

  /** Resumes and stages as dashed lines in every chart; spikes and the like as triangles at the top of the loss. */
  function drawMarks(u, chart) {
    const { ctx, bbox } = u, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    data.runs.forEach((run, number) => {
      for (const mark of isRunShown(number) ? run.marks : []) {
        const value = whereIs(number, mark), isLine = mark.kind === "resume" || mark.kind === "stage";
        if (value === null || (!isLine && !chart.wide)) continue;
        const x = u.valToPos(value, "x", true);
        ctx.beginPath();
        if (isLine) {
          ctx.strokeStyle = several ? color(`--run-${number % HUES}`) : color(MARKS.resume);
          ctx.globalAlpha = 0.65;
          ctx.lineWidth = ratio;
          ctx.setLineDash([3 * ratio, 3 * ratio]);
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
          ctx.setLineDash([]);
        } else {
          ctx.globalAlpha = 1;
          ctx.fillStyle = several ? color(`--run-${number % HUES}`) : color(MARKS[mark.kind]);
          ctx.moveTo(x - 5 * ratio, bbox.top);
          ctx.lineTo(x + 5 * ratio, bbox.top);
          ctx.lineTo(x, bbox.top + 8 * ratio);
          ctx.fill();
        }
      }
    });
    ctx.restore();
  }

  /** What happened near the cursor. */
  function happened(u) {
    const found = [];
    data.runs.forEach((run, number) => {
      for (const mark of isRunShown(number) ? run.marks : []) {
        const value = whereIs(number, mark);
        if (value === null || Math.abs(u.valToPos(value, "x") - u.cursor.left) > 6) continue;
        found.push(`${several ? `${run.name}: ` : ""}${mark.text}`);
      }
    });
    return found.slice(0, 3).map(text => ` · ${text}`).join("");
  }

  function nearest(column, i) {
    for (let d = 0; d < column.length; d++) {
      if (column[i - d] != null) return i - d;
      if (column[i + d] != null) return i + d;
    }
    return null;
  }

  /** Each line's own value under the cursor, or the last in view, and the mean there if it is drawn. */
  function showValues(u, chart, texts) {
    const isOver = u.cursor.left >= 0 && u.cursor.idx != null;
    const last = u.data[0].findLastIndex(x => x <= u.scales.x.max);
    const read = number => {
      const column = u.data[number], i = nearest(column, isOver ? u.cursor.idx : last);
      return i == null ? "" : FORMS[chart.unit](column[i]);
    };
    texts.forEach(({ value, mean, number }) => {
      value.textContent = read(number);
      const text = chart.smooth ? read(number + 1) : "";
      mean.textContent = text && `(mean ${text})`;
    });
    const where = isOver ? `${view.axis === "hours" ? "after" : "at"} ${AXES[view.axis](u.data[0][u.cursor.idx])}` : "";
    texts.where.textContent = where && where + (chart.wide ? happened(u) : "");
  }

  function button(parent, text, title, onclick) {
    const made = parent.appendChild(document.createElement("button"));
    return Object.assign(made, { textContent: text, title, onclick });
  }

  function frame(chart, lines) {
    const card = document.createElement("div");
    card.className = chart.wide ? "chart wide" : "chart";
    const head = card.appendChild(document.createElement("h3"));
    head.append(chart.title);
    if (chart.names.length > 1) {
      const choice = head.appendChild(document.createElement("select"));
      choice.append(...chart.names.map(name => new Option(name, name, false, name === chart.name)));
      choice.onchange = () => { chart.name = choice.value; draw(); };
    }
    head.appendChild(document.createElement("span"));
    if (chart.may_be_log) {
      const log = button(head, "log", "logarithmic y axis", () => { chart.isLog = !chart.isLog; draw(); });
      log.className = chart.isLog ? "on" : "";
    }
    button(head, "CSV", "download the values of the lines shown", () => saveValues(chart, lines));
    button(head, "PNG", "download the picture", () => savePicture(chart, lines));
    const note = card.appendChild(document.createElement("small"));
    note.textContent = chart.names.length === 1 ? `${chart.name}: ${chart.note}` : chart.note;
    const values = card.appendChild(document.createElement("div")), texts = [];
    values.className = "values";
    lines.forEach((series, line) => {
      const entry = values.appendChild(document.createElement("span"));
      const name = button(entry, "", "hide it", () => toggle(keyOf(series)));
      const isNext = line && series.place === undefined && lines[line - 1].run === series.run; // of the run just named
      name.append(swatch(series), isNext ? series.label : nameOf(chart, series));
      const number = 1 + line * (chart.smooth ? 2 : 1);
      const value = entry.appendChild(document.createElement("b")), mean = entry.appendChild(document.createElement("small"));
      texts.push({ value, mean, number });
    });
    texts.where = values.appendChild(document.createElement("span"));
    if (values.children.length > MANY) values.classList.add("many");
    return { card, texts };
  }

  const nameOf = (chart, series) =>
    [several ? data.runs[series.run].name : "", chart.names.length ? "" : series.label].filter(Boolean).join(" · ");

  /** The columns that uPlot draws in a range of x: each line, and its mean in a chart that has means. */
  function columnsOf(chart, lines, range) {
    const tables = [];
    for (const series of lines) {
      const raw = columns(series.run, series.x, series.y);
      tables.push(raw);
      if (!chart.smooth) continue;
      const source = series.mean_x ? columns(series.run, series.mean_x, series.mean_y) : raw;
      const smoothed = means(source, range);
      series.isSmoothed = Boolean(smoothed);
      tables.push(smoothed ?? [[raw[0][0]], [null]]);
    }
    return uPlot.join(tables, tables.map(() => [EXPANDED, EXPANDED]));
  }

  /** uPlot's settings of a line, and of its mean; a line with a mean is faint. */
  function looks(chart, series) {
    const strong = hue(series);
    const look = { stroke: () => series.isSmoothed ? faint(strong) : strong, width: 1.6, dash: dash(series),
      points: { show: series.dots, size: 5, fill: strong } };
    return chart.smooth ? [look, { stroke: strong, width: 2, dash: dash(series), points: { show: false } }] : [look];
  }

  function plot(chart) {
    const lines = chart.series.filter(series => isShown(chart, series) && series.x.length && at(series.run, series.x[0]) !== null);
    if (!lines.length) return null;
    const { card, texts } = frame(chart, lines);
    place.appendChild(card);
    const box = card.appendChild(document.createElement("div"));
    const isLog = chart.isLog && lines.every(series => series.y.every(value => value > 0));
    const size = () => ({ width: Math.max(200, card.clientWidth - 24), height: chart.wide ? Math.min(360, 200 + card.clientWidth / 6) : 190 });
    const axisLook = { stroke: color("--soft"), font: "12px system-ui, sans-serif", ticks: { stroke: color("--line"), width: 1 },
      grid: { stroke: color("--grid"), width: 1 } };
    const range = extent();
    const u = new uPlot({
      ...size(),
      legend: { show: false },
      padding: [10, 14, 0, 0],
      cursor: {
        sync: { key: "keel", scales: ["x", null], filters: { pub: kind => kind !== "mousedown" && kind !== "mouseup" } },
        drag: { x: true, y: true, uni: 30, dist: 4, setScale: false },
        dataIdx: (u, number, i) => nearest(u.data[number], i),
        points: { size: 7 },
        bind: { dblclick: () => () => { view.x = chart.y = null; view.last = 1; update(); } },
        y: false,
      },
      scales: { x: { time: false, auto: false, min: range[0], max: range[1] }, y: { distr: isLog ? 3 : 1 } },
      axes: [
        { ...axisLook, space: 64, size: 32, values: (u, ticks) => ticks.map(AXES[view.axis]) },
        { ...axisLook, size: 70, space: 32, incrs: chart.unit === "bytes" ? POWERS : undefined, values: (u, ticks) => ticks.map(tick => tick == null ? "" : FORMS[chart.unit](tick)) },
      ],
      series: [{}, ...lines.flatMap(series => looks(chart, series))],
      hooks: {
        draw: [u => drawMarks(u, chart)],
        setCursor: [u => showValues(u, chart, texts)],
        setSelect: [u => zoom(u, chart)],
      },
    }, columnsOf(chart, lines, range), box);
    chart.canvas = u.ctx.canvas;
    touch(u);
    new ResizeObserver(() => { const next = size(); if (next.width !== u.width) u.setSize(next); }).observe(card);
    return { u, chart, lines, show: () => showValues(u, chart, texts) };
  }

  /** A drag sideways is a zoom of all charts, upward of this one; uPlot selects the whole other side then. */
  function zoom(u, chart) {
    const { left, top, width, height } = u.select, { clientWidth, clientHeight } = u.over;
    if (width && width < clientWidth - 1) view.x = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    if (height && height < clientHeight - 1) chart.y = [u.posToVal(top + height, "y"), u.posToVal(top, "y")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    update();
  }

  /** A finger that slides over a chart reads values in all of them; up and down it scrolls the page. */
  function touch(u) {
    u.over.style.touchAction = "pan-y";
    const read = event => {
      const { left, top } = u.over.getBoundingClientRect(), finger = event.touches[0];
      const x = u.posToVal(finger.clientX - left, "x");
      for (const { u: other } of plots) other.setCursor({ left: other.valToPos(x, "x"), top: finger.clientY - top });
    };
    u.over.addEventListener("touchstart", read, { passive: true });
    u.over.addEventListener("touchmove", read, { passive: true });
  }

  // ------------------------------------------------------------------ downloads

  function save(name, blob) {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  /** A cell that no spreadsheet takes for a formula. */
  const cell = text => `"${text.replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;

  function saveValues(chart, lines) {
    const [steps, ...values] = uPlot.join(lines.map(series => [series.x, series.y]));
    const head = ["step", ...lines.map(series => nameOf(chart, series) || chart.title)].map(cell);
    const rows = steps.map((step, i) => [step, ...values.map(column => column[i] ?? "")]);
    save(`${chart.title}.csv`, new Blob([[head, ...rows].map(row => `${row.join(",")}\n`).join("")], { type: "text/csv" }));
  }

  /** The chart with its title and the names of its lines. */
  function savePicture(chart, lines) {
    const ratio = devicePixelRatio, drawn = chart.canvas, row = 20 * ratio;
    const canvas = document.createElement("canvas"), ctx = canvas.getContext("2d");
    const font = `${13 * ratio}px system-ui, sans-serif`;
    ctx.font = font;
    let x = 12 * ratio, y = 2.4 * row;
    const entries = lines.map(series => {
      const text = nameOf(chart, series), width = ctx.measureText(text).width + 46 * ratio;
      if (x + width > drawn.width && x > 12 * ratio) { x = 12 * ratio; y += row; }
      x += width;
      return { series, text, x: x - width, y };
    });
    Object.assign(canvas, { width: drawn.width, height: y + row + drawn.height });
    ctx.fillStyle = color("--card");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.fillStyle = color("--text");
    ctx.font = `bold ${font}`;
    ctx.fillText([chart.title, chart.name].filter(Boolean).join(": "), 12 * ratio, 1.2 * row);
    ctx.font = font;
    for (const { series, text, x, y } of entries) {
      Object.assign(ctx, { strokeStyle: hue(series), lineWidth: 3 * ratio });
      ctx.setLineDash(dash(series).map(part => part * ratio));
      ctx.stroke(new Path2D(`M${x} ${y - 4 * ratio}h${24 * ratio}`));
      ctx.fillText(text, x + 30 * ratio, y);
    }
    ctx.drawImage(drawn, 0, y + row / 2);
    canvas.toBlob(blob => save(`${chart.title}.png`, blob));
  }

  // ------------------------------------------------------------------ all charts

  /** Make all charts again: other lines, or another x axis. */
  function draw() {
    for (const { u } of plots) u.destroy();
    place.replaceChildren();
    plots = data.charts.map(plot).filter(Boolean);
    update();
  }

  /** Draw the charts' lines again: another zoom, or other means. */
  function update() {
    const [min, max] = extent();
    for (const { u, chart, lines, show } of plots) {
      u.batch(() => {
        u.setData(columnsOf(chart, lines, [min, max]), false);
        u.setScale("x", { min, max });
        if (chart.y) u.setScale("y", { min: chart.y[0], max: chart.y[1] });
      });
      show();
    }
    controls();
    writeAddress();
  }

  const slider = document.getElementById("smooth"), chips = document.getElementById("runs");

  function controls() {
    for (const choice of document.querySelectorAll(".switch")) {
      const chosen = choice.dataset.choice === "last" && view.x ? "" : String(view[choice.dataset.choice]);
      for (const button of choice.children) button.classList.toggle("on", button.value === chosen);
    }
    slider.value = view.smooth;
    slider.nextElementSibling.textContent = view.smooth ? `${view.smooth}%` : "off";
    slider.parentNode.title = "the strong line is the mean of this share of the points in view, around each";
    chips.replaceChildren();
    const hidden = [...view.hidden].filter(key => !several || !data.runs.some(run => run.name === key));
    for (const key of hidden) button(chips, key.replace(/^name /, ""), "show it", () => toggle(key)).className = "off";
    if (!several) return;
    data.runs.forEach((run, number) => {
      const chip = button(chips, "", "show or hide it", () => toggle(run.name));
      chip.append(swatch({ run: number }), run.name);
      chip.className = isRunShown(number) ? "" : "off";
    });
    const set = names => () => { view.hidden = new Set(names); draw(); };
    button(chips, "all", "show all runs", set([])).className = "all";
    button(chips, "none", "hide all runs", set(data.runs.map(run => run.name))).className = "all";
  }

  for (const choice of document.querySelectorAll(".switch")) {
    choice.onclick = event => {
      if (event.target.tagName !== "BUTTON") return;
      view.x = null;
      if (choice.dataset.choice === "axis") view.axis = event.target.value; else view.last = Number(event.target.value);
      draw();
    };
  }
  slider.oninput = () => {
    view.smooth = Number(slider.value);
    try { localStorage.setItem("keel.smooth", view.smooth); } catch { /* a browser may forbid it */ }
    update();
  };
  window.addEventListener("hashchange", () => { readAddress(); draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  readAddress();
  draw();
  if (data.renew_seconds) setTimeout(() => location.reload(), 1000 * data.renew_seconds);
})();
