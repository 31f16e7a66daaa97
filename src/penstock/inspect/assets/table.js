// Tables whose rows are made only where they are seen.

// columns: [{key, title, width, number, text(row), value(row)}]; rows: any; stepOf(row): its step.
function makeTable(stage, columns, rows, stepOf, sorting) {
  const box = stage.appendChild(element("div", {className: "rows"})), ROW = 24, HEAD = 28;
  const grid = columns.map(c => c.width + "px").join(" ");
  const head = box.appendChild(element("div", {className: "head"})), body = box.appendChild(element("div"));
  head.style.gridTemplateColumns = body.style.gridTemplateColumns = grid;
  body.style.position = "relative";
  let shown = [];
  for (const column of columns) {
    const button = head.appendChild(element("button", {title: column.title, className: column.number ? "number" : ""}));
    button.dataset.column = column.key;
    button.onclick = () => {
      sorting.down = sorting.key === column.key ? !sorting.down : !!column.number;
      sorting.key = column.key;
      refresh();
    };
  }

  function refresh() {
    const column = columns.find(c => c.key === sorting.key) || columns[0];
    shown = rows.filter(row => !state.matches || state.matches.has(stepOf(row)));
    const compare = (a, b) => column.number ? (a ?? -Infinity) - (b ?? -Infinity) : String(a).localeCompare(String(b), "en", {numeric: true});
    shown = shown.map((row, i) => [column.value(row), i, row]).sort((a, b) => (sorting.down ? compare(b[0], a[0]) : compare(a[0], b[0])) || a[1] - b[1]).map(item => item[2]);
    columns.forEach((c, i) => {
      head.children[i].textContent = (c.key === sorting.key ? (sorting.down ? "\u25be " : "\u25b4 ") : "") + c.title;
      head.children[i].setAttribute("aria-sort", c.key === sorting.key ? (sorting.down ? "descending" : "ascending") : "none");
    });
    body.style.height = shown.length * ROW + "px";
    body.style.minWidth = d3.sum(columns, c => c.width) + "px";
    fill();
  }

  function fill() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 5), last = Math.min(shown.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + 5);
    const made = [];
    for (let i = first; i < last; i++) {
      const row = shown[i], step = stepOf(row);
      const line = element("div", {className: "row" + (step === state.step ? " on" : ""), onclick: () => select(step)});
      line.dataset.step = step;
      line.style.cssText = `top:${i * ROW}px;grid-template-columns:${grid}`;
      for (const column of columns) {
        const text = column.text(row);
        line.append(element("span", {textContent: text, title: text, className: column.number ? "number" : ""}));
      }
      made.push(line);
    }
    body.replaceChildren(...made);
  }

  box.onscroll = fill;
  new ResizeObserver(fill).observe(box);
  refresh();
  return {
    refresh, fill,
    get rows() { return shown; },
    reveal(step) {
      const i = shown.findIndex(row => stepOf(row) === step);
      if (i < 0) return fill();
      const top = i * ROW;
      if (top < box.scrollTop || top + ROW + HEAD > box.scrollTop + box.clientHeight) box.scrollTop = Math.max(0, top - box.clientHeight / 2);
      fill();
    },
  };
}

const column = (key, title, width, value, text) => ({key, title, width, value, number: !!text, text: text ? row => { const v = value(row); return v === null ? "" : text(v); } : row => String(value(row))});

// What a step could reach at most in float32: the roof above its operations for each byte.
const roofAt = intensity => Math.min(data.peak.flops_per_s, intensity * data.peak.bytes_per_s);
const rate = (of, s) => steps[of][s] && steps.seconds[s] ? steps[of][s] * steps.count[s] / steps.seconds[s] : null;
const reached = s => { const r = rate("flops", s); return r === null || !steps.bytes[s] || steps.precision[s] !== "float32" ? null : r / roofAt(steps.flops[s] / steps.bytes[s]); };

const stepTable = (() => {
  let table = null;
  const sorting = {key: "time", down: true};
  const columns = [
    column("number", "#", 56, s => s + 1, d3.format("d")),
    column("operation", "operation", 170, s => steps.operation[s]),
    column("name", "name", 220, s => steps.name[s]),
    column("backend", "backend", 76, s => steps.backend[s]),
    column("dtype", "dtype", 72, s => steps.precision[s]),
    column("time", "time", 92, s => seconds[s], format.seconds),
    column("share", "share", 66, s => totalSeconds ? seconds[s] / totalSeconds : 0, format.share),
    column("count", "times", 62, s => steps.count[s], d3.format("~r")),
    column("flops", "FLOP", 78, s => steps.flops[s], format.si),
    column("bytes", "moved", 84, s => steps.bytes[s], format.bytes),
    column("rate", "FLOP/s", 78, s => rate("flops", s), format.si),
    column("bandwidth", "B/s", 74, s => rate("bytes", s), format.si),
    column("roof", "of roof", 70, reached, format.share),
    column("written", "writes", 84, s => steps.written[s], format.bytes),
    column("workspace", "workspace", 84, s => steps.workspace[s], format.bytes),
  ];
  views.steps = {
    title: "Steps",
    open(stage, bar) {
      bar.append(`${format.count(count)} steps, ${format.seconds(data.alone_s)} a run (mean of ${data.runs}), ${format.seconds(data.observed_s)} observed; a click on a title sorts`);
      table = makeTable(stage, columns, d3.range(count), s => s, sorting);
      if (state.step >= 0) table.reveal(state.step);
    },
    draw: () => table.refresh(),
    reveal: step => table.reveal(step),
  };
  return {columns, get rows() { return table ? table.rows : []; }};
})();
