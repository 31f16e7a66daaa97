// The roofline: what each step reaches, over its operations for each byte that it moves.

const roofline = (() => {
  const LEFT = 80, TOP = 24, BOTTOM = 40;
  let surface = null, zoom = null, view = d3.zoomIdentity, x = null, y = null;
  const points = d3.range(count).filter(s => !inner.has(s) && rate("flops", s) && steps.bytes[s])
    .map(s => ({step: s, intensity: steps.flops[s] / steps.bytes[s], rate: rate("flops", s)}));
  const ridge = data.peak.flops_per_s / data.peak.bytes_per_s;
  const low = Math.min(ridge / 100, d3.min(points, p => p.intensity) || 1), high = Math.max(ridge * 20, d3.max(points, p => p.intensity) || 1);
  const radius = p => 3 + 14 * Math.sqrt(seconds[p.step] / mostSeconds);

  function draw(context, width, height) {
    const bottom = Math.min(d3.min(points, p => p.rate) || 1e9, roofAt(low)) / 2;
    x = view.rescaleX(d3.scaleLog([low / 1.5, high], [LEFT, width - 20]));
    y = view.rescaleY(d3.scaleLog([bottom, data.peak.flops_per_s * 3], [height - BOTTOM, TOP]));
    context.font = "11px system-ui, sans-serif";
    const powers = scale => d3.range(Math.ceil(Math.log10(Math.min(...scale.domain()))), Math.floor(Math.log10(Math.max(...scale.domain()))) + 1).map(p => 10 ** p);
    for (const tick of powers(y)) {
      context.fillStyle = "#eaeef2";
      context.fillRect(LEFT, y(tick), width - LEFT, 1);
      context.fillStyle = "#57606a";
      context.fillText(format.si(tick) + "FLOP/s", 6, y(tick) + 4);
    }
    for (const tick of powers(x)) {
      context.fillStyle = "#eaeef2";
      context.fillRect(x(tick), TOP, 1, height - TOP - BOTTOM);
      context.fillStyle = "#57606a";
      context.fillText(String(+tick.toPrecision(2)), x(tick) - 6, height - BOTTOM + 16);
    }
    context.fillText("floating-point operations for each byte moved", LEFT + 10, height - 8);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP - 10, width - LEFT, height - TOP - BOTTOM + 10);
    context.clip();
    context.strokeStyle = "#1b1f24";
    context.lineWidth = 2;
    context.beginPath();
    const [from, to] = x.domain();
    context.moveTo(x(from), y(roofAt(from)));
    context.lineTo(x(Math.min(Math.max(ridge, from), to)), y(roofAt(Math.min(Math.max(ridge, from), to))));
    context.lineTo(x(to), y(roofAt(to)));
    context.stroke();
    for (const p of points) {
      context.globalAlpha = state.matches && !state.matches.has(p.step) ? 0.12 : 0.75;
      context.fillStyle = operationColour(steps.operation[p.step]);
      context.beginPath();
      context.arc(x(p.intensity), y(p.rate), radius(p), 0, 7);
      context.fill();
    }
    const chosen = points.find(p => p.step === state.step);
    if (chosen) {
      context.globalAlpha = 1;
      context.strokeStyle = "#000";
      context.beginPath();
      context.arc(x(chosen.intensity), y(chosen.rate), radius(chosen) + 1, 0, 7);
      context.stroke();
    }
    context.restore();
  }

  function at(event) {
    const [px, py] = d3.pointer(event, surface.canvas);
    const best = d3.least(points, p => Math.max(0, Math.hypot(x(p.intensity) - px, y(p.rate) - py) - radius(p)) + radius(p) * 1e-3);
    return best && Math.hypot(x(best.intensity) - px, y(best.rate) - py) < radius(best) + 5 ? best : null;
  }

  views.roofline = {
    title: "Roofline",
    open(stage, bar) {
      surface = makeCanvas(stage, draw);
      surface.now();
      zoom = d3.zoom().scaleExtent([0.5, 50]).clickDistance(4).on("zoom", event => { view = event.transform; surface.redraw(); });
      bar.append(`roof: ${format.si(data.peak.flops_per_s)}FLOP/s in float32 (${data.peak.threads > 1 ? data.peak.threads + " times " : ""}the fastest product on one thread, or the fastest step), ${format.si(data.peak.bytes_per_s)}B/s through memory (a copy); a disc is as large as the time of its step; values in caches may be above the slope`);
      const canvas = d3.select(surface.canvas).call(zoom).on("dblclick.zoom", null);
      canvas.on("click", event => { const p = at(event); select(p ? p.step : -1); });
      canvas.on("mousemove", event => { const p = at(event); showTip(event, p ? `${stepTip(p.step)}\n${format.share(reached(p.step))} of the roof` : ""); }).on("mouseleave", event => showTip(event, ""));
    },
    draw: () => surface.redraw(),
    reveal: () => surface.redraw(),
  };

  return {
    points,
    pointOf(step) {
      const p = points.find(p => p.step === step), {left, top} = surface.canvas.getBoundingClientRect();
      return [left + x(p.intensity), top + y(p.rate)];
    },
  };
})();
