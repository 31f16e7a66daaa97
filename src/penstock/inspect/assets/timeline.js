// The time line: a track for each worker or stream, a bar for each execution of a step, and below
// the bytes that the run holds.

const timeline = (() => {
  const line = data.timeline, LEFT = 130, TOP = 26, BAR = 20, CURVE = 110;
  let surface = null, zoom = null, view = null;
  const base = d3.scaleLinear([0, Math.max(line.duration, 1e-3)], [LEFT, 1000]);
  // Bars on a track nest: those of a block stand below the one of its step.
  const spans = line.spans.map(([step, track, begin, duration, moved], i) => ({i, step, track, begin, end: begin + duration, moved, depth: 0}));
  const depths = line.tracks.map(() => 1), stacks = line.tracks.map(() => []);
  for (const span of spans) {
    const stack = stacks[span.track];
    while (stack.length && stack[stack.length - 1].end <= span.begin) stack.pop();
    span.depth = stack.length;
    stack.push(span);
    depths[span.track] = Math.max(depths[span.track], stack.length);
  }
  const used = line.tracks.map((_, t) => spans.some(span => span.track === t));
  const top = [];
  let below = TOP;
  line.tracks.forEach((_, t) => { top.push(below); if (used[t]) below += depths[t] * BAR + 10; });
  const highest = d3.max(line.live, point => point[1]) || 1;

  function draw(context, width, height) {
    base.range([LEFT, width - 16]);
    const x = view ? view.rescaleX(base) : base;
    drawAxis(context, x, TOP - 6, below + CURVE + 14, format.us);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT, height);
    context.clip();
    let last = [];
    for (const span of spans) {
      const a = x(span.begin), b = x(span.end), y = top[span.track] + span.depth * BAR, lane = span.track * 64 + span.depth;
      if (b < LEFT || a > width) continue;
      if (b - a < 0.4 && last[lane] === Math.round(a) && span.step !== state.step) continue;
      last[lane] = Math.round(a);
      const w = Math.max(b - a, 0.8);
      context.globalAlpha = state.matches && !state.matches.has(span.step) ? 0.2 : 1;
      context.fillStyle = inner.has(span.step) ? "#aeb7c2" : operationColour(steps.operation[span.step]);
      context.fillRect(a, y, w, BAR - 2);
      if (span.step === state.step) {
        context.strokeStyle = "#000";
        context.lineWidth = 2;
        context.strokeRect(a, y, w, BAR - 2);
      }
      if (w > 24) {
        context.fillStyle = "#fff";
        context.font = "11px system-ui, sans-serif";
        clippedText(context, stepLabel(span.step), Math.max(a, LEFT) + 3, y + 13, Math.min(b, width) - Math.max(a, LEFT) - 6);
      }
      context.globalAlpha = 1;
    }
    const y = d3.scaleLinear([0, highest], [below + CURVE, below + 14]);
    const area = d3.area(d => x(d[0]), y(0), d => y(d[1])).curve(d3.curveStepAfter).context(context);
    context.beginPath();
    area(line.live.concat(line.live.length ? [[line.duration, line.live[line.live.length - 1][1]]] : []));
    context.fillStyle = "#9ec5e8";
    context.fill();
    context.restore();
    context.fillStyle = "#1b1f24";
    context.font = "11px system-ui, sans-serif";
    line.tracks.forEach((name, t) => { if (used[t]) clippedText(context, name, 10, top[t] + 14, LEFT - 14); });
    context.fillText("bytes held", 10, below + 26);
    context.fillStyle = "#57606a";
    context.fillText(`up to ${format.bytes(highest)}`, 10, below + 41);
  }

  function at(event) {
    const [px, py] = d3.pointer(event, surface.canvas), x = view ? view.rescaleX(base) : base, t = x.invert(px), slack = Math.abs(x.invert(px + 2) - t);
    let best = null;
    for (const span of spans) {
      const y = top[span.track] + span.depth * BAR;
      if (py >= y && py < y + BAR && t >= span.begin - slack && t <= span.end + slack && (!best || span.end - span.begin < best.end - best.begin)) best = span;
    }
    return best;
  }

  function reveal(step) {
    const span = spans.find(span => span.step === step);
    if (!surface || !span) return;
    const x = view ? view.rescaleX(base) : base, a = x(span.begin), b = x(span.end);
    if (a < LEFT || b > surface.width || b - a < 6) {
      const k = Math.min(1e5, Math.max(1, 60 / Math.max(base(span.end) - base(span.begin), 1e-6)));
      const middle = (base(span.begin) + base(span.end)) / 2;
      d3.select(surface.canvas).call(zoom.transform, d3.zoomIdentity.translate((LEFT + surface.width) / 2 - middle * k, 0).scale(k));
    }
    surface.redraw();
  }

  views.timeline = {
    title: "Timeline",
    open(stage, bar) {
      surface = makeCanvas(stage, draw);
      surface.now();
      zoom = d3.zoom().scaleExtent([1, 1e5]).clickDistance(4).on("zoom", event => { view = event.transform; surface.redraw(); });
      const size = () => [[LEFT, 0], [surface.width, surface.height]];
      zoom.extent(size).translateExtent([[LEFT, -Infinity], [surface.width - 16, Infinity]]);
      const more = line.executions > spans.length ? `, the first ${format.count(spans.length)} are shown` : "";
      const copied = d3.sum(spans, span => span.moved);
      bar.append(`one observed run, ${format.us(line.duration)}; ${format.count(line.executions)} executions of steps${more}` + (copied ? `; ${format.bytes(copied)} copied between backends` : "") + (line.of_devices ? "; on tracks of devices, while the host puts steps there" : ""),
        element("button", {textContent: "whole run", onclick: () => d3.select(surface.canvas).call(zoom.transform, d3.zoomIdentity)}));
      const canvas = d3.select(surface.canvas).call(zoom).on("dblclick.zoom", null);
      if (view) canvas.call(zoom.transform, view);
      canvas.on("click", event => { const span = at(event); select(span ? span.step : -1); });
      canvas.on("mousemove", event => { const span = at(event); showTip(event, span ? `${stepTip(span.step)}\nhere ${format.us(span.end - span.begin)} from ${format.us(span.begin)}` : ""); })
        .on("mouseleave", event => showTip(event, ""));
      if (state.step >= 0) reveal(state.step);
    },
    draw: () => surface.redraw(),
    reveal,
  };

  return {
    spans,
    pointOf(step) {
      const span = spans.find(span => span.step === step), x = view ? view.rescaleX(base) : base;
      const {left, top: above} = surface.canvas.getBoundingClientRect();
      return [left + (x(span.begin) + x(span.end)) / 2, above + top[span.track] + span.depth * BAR + 8];
    },
  };
})();
