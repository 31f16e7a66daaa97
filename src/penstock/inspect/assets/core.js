"use strict";
// What all views share: the data, the selected step, formats, colours, and canvases.

const data = JSON.parse(document.getElementById("data").textContent);
const steps = data.steps.name ? data.steps : Object.assign({name: []}, data.steps);
const slots = data.slots.name ? data.slots : Object.assign({name: []}, data.slots);
const count = steps.name.length;
const state = {view: "", step: -1, query: "", matches: null, colour: "time"};
const views = {};  // name: {title, open(stage, bar), draw(), reveal(step)}

// The step that computes a slot, through views, which no step computes; and the steps that read it.
const maker = new Array(slots.name.length).fill(-1);
for (let s = 0; s < count; s++) for (const slot of steps.outputs[s]) maker[slot] = s;
for (let i = 0; i < maker.length; i++) {
  let slot = i, hops = 0;
  while (maker[slot] < 0 && slots.base[slot] >= 0 && hops++ < 100) slot = slots.base[slot];
  if (maker[i] < 0) maker[i] = maker[slot];
}
const readers = slots.name.map(() => []);
for (let s = 0; s < count; s++) for (const slot of steps.inputs[s]) readers[slot].push(s);
const inner = new Map();  // step: the steps of its blocks
for (let s = 0; s < count; s++) {
  const parent = steps.parent[s];
  if (parent >= 0) (inner.get(parent) || inner.set(parent, []).get(parent)).push(s);
}
// A step with blocks takes what the steps in them take.
const seconds = count ? steps.seconds.slice() : [];
for (let s = count - 1; s >= 0; s--) if (steps.parent[s] >= 0) seconds[steps.parent[s]] += seconds[s];
const totalSeconds = d3.sum(d3.range(count).filter(s => steps.parent[s] < 0), s => seconds[s]);

const format = {
  count: d3.format(","),
  seconds: x => x === 0 ? "0" : x < 1e-3 ? (x * 1e6).toFixed(1) + " us" : x < 1 ? (x * 1e3).toFixed(3) + " ms" : x.toFixed(3) + " s",
  us: x => format.seconds(x * 1e-6),
  bytes: x => x < 1024 ? x + " B" : x < 1048576 ? (x / 1024).toFixed(1) + " KiB" : x < 1073741824 ? (x / 1048576).toFixed(1) + " MiB" : (x / 1073741824).toFixed(2) + " GiB",
  si: x => x === 0 ? "0" : d3.format(".3~s")(x),
  share: x => (x * 100).toFixed(1) + "%",
};

const backendColour = d3.scaleOrdinal(d3.schemeTableau10);
const operationColour = d3.scaleOrdinal(d3.schemeTableau10);
[...new Set(steps.backend || [])].filter(b => b).forEach(b => backendColour(b));
const mostSeconds = d3.max(d3.range(count).filter(s => !inner.has(s)), s => seconds[s]) || 1;

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function stepLabel(step) { return `${step + 1} ${steps.operation[step]}`; }

// The scope of a step, with slashes between its parts.
function scopeOf(step) {
  const parts = [];
  for (let scope = steps.scope[step]; scope >= 0; scope = data.scopes[scope][0]) parts.unshift(data.scopes[scope][1]);
  return parts.join("/");
}

function stepTip(step) {
  const rate = seconds[step] && steps.flops[step] ? `, ${format.si(steps.flops[step] * steps.count[step] / seconds[step])}FLOP/s` : "";
  return `${stepLabel(step)}\n${steps.origin[step]}\n${steps.backend[step]} ${format.seconds(seconds[step])}${rate}, writes ${format.bytes(steps.written[step])}`;
}

const tip = document.getElementById("tip");
function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(0, Math.min(event.clientX + 14, innerWidth - box.width - 4)) + "px";
  tip.style.top = Math.max(0, Math.min(event.clientY + 14, innerHeight - box.height - 4)) + "px";
}

// A canvas that fills its stage, with sharp pixels; draw(context, width, height) is called once a
// frame at most.
function makeCanvas(stage, draw) {
  const canvas = stage.appendChild(element("canvas"));
  const context = canvas.getContext("2d");
  let asked = false;
  const surface = {
    canvas, width: 0, height: 0, drawings: 0,
    redraw() {
      if (asked) return;
      asked = true;
      requestAnimationFrame(surface.now);
    },
    now() {
      asked = false;
      if (!canvas.isConnected) return;
      const {width, height} = stage.getBoundingClientRect(), ratio = devicePixelRatio || 1;
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
      }
      surface.width = width;
      surface.height = height;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, height);
      surface.drawings++;
      draw(context, width, height);
    },
  };
  const sizes = new ResizeObserver(() => surface.redraw());
  sizes.observe(stage);
  return surface;
}

// Text that fits into a width, drawn at its left end.
function clippedText(context, text, x, y, width, each = 6.2) {
  const room = Math.floor(width / each);
  if (room < 2) return;
  context.fillText(text.length <= room ? text : text.slice(0, room - 1) + "\u2026", x, y);
}

// The axis of a scale along the upper edge, with lines down to y1.
function drawAxis(context, scale, y0, y1, text) {
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  for (const tick of scale.ticks(8)) {
    const x = scale(tick);
    context.fillStyle = "#eaeef2";
    context.fillRect(x, y0, 1, y1 - y0);
    context.fillStyle = "#57606a";
    context.fillText(text(tick), x, y0 - 4);
  }
  context.textAlign = "left";
}

function pressed(bar, choices, chosen, choose) {
  for (const [name, title] of choices) {
    const button = element("button", {textContent: title, onclick: () => {
      for (const other of bar.querySelectorAll("button[data-choice]")) other.setAttribute("aria-pressed", other === button);
      choose(name);
    }});
    button.dataset.choice = name;
    button.setAttribute("aria-pressed", name === chosen);
    bar.append(button);
  }
}
