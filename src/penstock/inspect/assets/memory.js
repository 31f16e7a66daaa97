// The arena: a box for each buffer, from its first tick to its last, at its offset; the live bytes
// above, and what makes the peak beside.

const memory = (() => {
  const arena = data.arena, LEFT = 80, TOP = 26, CURVE = 80, SIDE = 300;
  let surface = null, zoom = null, view = null, side = null;
  const base = d3.scaleLinear([0, arena ? Math.max(arena.clock.length, 1) : 1], [LEFT, 1000]);
  const y = d3.scaleLinear([0, arena ? Math.max(arena.size, 1) : 1], [500, TOP + CURVE + 20]);
  const ownerStep = buffer => {
    for (const slot of buffer[5]) if (maker[slot] >= 0) return maker[slot];
    return arena.clock[buffer[3]];
  };

  function draw(context, width, height) {
    base.range([LEFT, width - SIDE - 16]);
    y.range([height - 24, TOP + CURVE + 24]);
    const x = view ? view.rescaleX(base) : base;
    drawAxis(context, x, TOP - 6, height - 24, tick => Number.isInteger(tick) ? `tick ${tick}` : "");
    context.fillStyle = "#57606a";
    for (const tick of y.ticks(5)) context.fillText(format.bytes(Math.round(tick)), 6, y(tick) + 4);
    context.fillText("live bytes", 6, TOP + 14);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP - 6, width - SIDE - LEFT - 16, height);
    context.clip();
    const atPeak = new Set(arena.peak.buffers);
    const tick = arena.peak.tick;
    arena.buffers.forEach((buffer, i) => {
      const [, offset, bytes, first, last, members] = buffer, a = x(first), b = x(last + 1);
      if (!bytes || b < LEFT || a > width) return;
      const own = members.some(slot => maker[slot] === state.step);
      const read = state.step >= 0 && members.some(slot => steps.inputs[state.step].includes(slot));
      context.globalAlpha = state.matches && !members.some(slot => state.matches.has(maker[slot])) ? 0.25 : 1;
      context.fillStyle = own ? "#0b5cad" : read ? "#58a6ff" : atPeak.has(i) ? "#e4573d" : "#b9c6d3";
      const h = Math.max(y(offset) - y(offset + bytes), 0.7);
      context.fillRect(a, y(offset + bytes), Math.max(b - a, 0.7), h);
      if (h > 3 && b - a > 3) {
        context.strokeStyle = "#fff";
        context.lineWidth = 1;
        context.strokeRect(a, y(offset + bytes), b - a, h);
      }
      if (h > 12 && b - a > 40) {
        context.fillStyle = own || read || atPeak.has(i) ? "#fff" : "#1b1f24";
        clippedText(context, slots.name[buffer[0]], Math.max(a, LEFT) + 4, y(offset + bytes) + Math.min(14, h - 2), Math.min(b, width) - Math.max(a, LEFT) - 8);
      }
      context.globalAlpha = 1;
    });
    const live = d3.scaleLinear([0, Math.max(arena.size, 1)], [TOP + CURVE, TOP]);
    context.beginPath();
    d3.area((d, i) => x(i), live(0), d => live(d)).curve(d3.curveStepAfter).context(context)([...arena.live, 0]);
    context.fillStyle = "#9ec5e8";
    context.fill();
    if (tick >= 0) {
      context.fillStyle = "#e4573d";
      context.fillRect(x(tick + 0.5) - 0.5, TOP, 1.5, height - TOP - 24);
      context.fillText("peak", x(tick + 0.5) + 4, TOP + 10);
    }
    context.restore();
  }

  function at(event) {
    const [px, py] = d3.pointer(event, surface.canvas), x = view ? view.rescaleX(base) : base, t = x.invert(px), offset = y.invert(py);
    if (px > surface.width - SIDE - 16 || px < LEFT) return null;
    return arena.buffers.find(([, o, bytes, first, last]) => bytes && t >= first && t < last + 1 && offset >= o && offset < o + bytes) || null;
  }

  function describe(buffer) {
    const names = buffer[5].map(slot => slots.name[slot]);
    const shown = names.slice(0, 6).join(", ") + (names.length > 6 ? ` and ${names.length - 6} more` : "");
    return `${shown}\n${format.bytes(buffer[2])} at offset ${format.count(buffer[1])}, ticks ${buffer[3]} to ${buffer[4]}`;
  }

  views.memory = {
    title: "Memory",
    open(stage, bar) {
      if (!arena || !arena.buffers.length) {
        stage.append(element("p", {className: "muted", style: "padding:20px", textContent: arena ? "No value of this plan lies in an arena." : "This executor plans no arena: values are allocated during the run. The time line shows the bytes held."}));
        surface = null;
        return;
      }
      surface = makeCanvas(stage, draw);
      surface.now();
      zoom = d3.zoom().scaleExtent([1, Math.max(1, arena.clock.length / 4)]).clickDistance(4).on("zoom", event => { view = event.transform; surface.redraw(); });
      zoom.extent(() => [[LEFT, 0], [surface.width - SIDE - 16, surface.height]]).translateExtent([[LEFT, -Infinity], [surface.width - SIDE - 16, Infinity]]);
      bar.append(`arena ${format.bytes(arena.size)}, lower bound ${format.bytes(arena.lower_bound)}, planner ${arena.planner}; constants ${format.bytes(data.constant_bytes)}; ticks are steps in the order of the plan`,
        element("button", {textContent: "whole plan", onclick: () => d3.select(surface.canvas).call(zoom.transform, d3.zoomIdentity)}));
      side = stage.appendChild(element("div", {className: "side"}));
      const step = arena.clock[arena.peak.tick];
      side.append(element("b", {textContent: `Peak: ${format.bytes(arena.peak.bytes)} live`}), element("br"));
      if (step >= 0) side.append("at ", element("a", {textContent: stepLabel(step), onclick: () => select(step)}));
      const list = side.appendChild(element("ol"));
      list.id = "peak";
      for (const i of arena.peak.buffers.slice(0, 200)) {
        const buffer = arena.buffers[i], from = ownerStep(buffer);
        list.append(element("li", {textContent: `${format.bytes(buffer[2])}  ${slots.name[buffer[0]]}` + (from >= 0 ? ` (${stepLabel(from)})` : ""), onclick: () => select(from)}));
      }
      const canvas = d3.select(surface.canvas).call(zoom).on("dblclick.zoom", null);
      if (view) canvas.call(zoom.transform, view);
      canvas.on("click", event => { const buffer = at(event); select(buffer ? ownerStep(buffer) : -1); });
      canvas.on("mousemove", event => { const buffer = at(event); showTip(event, buffer ? describe(buffer) : ""); }).on("mouseleave", event => showTip(event, ""));
    },
    draw: () => surface && surface.redraw(),
    reveal: () => surface && surface.redraw(),
  };

  return {
    pointOf(index) {
      const [, offset, bytes, first, last] = arena.buffers[index], x = view ? view.rescaleX(base) : base;
      const {left, top} = surface.canvas.getBoundingClientRect();
      return [left + (x(first) + x(last + 1)) / 2, top + y(offset + bytes / 2)];
    },
  };
})();
