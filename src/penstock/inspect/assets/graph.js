// The graph: boxes of steps, with the blocks of an If or a loop in the box of their step.

const graph = (() => {
  const open = new Set();  // steps whose blocks are shown
  let boxes = [], curves = [], size = [0, 0], boxOf = new Map();
  let surface = null, transform = d3.zoomIdentity, zoom = null, drawn = 0, hovered = -1;
  const HEAD = 24, PAD = 12;

  const edgesOf = new Map();  // of the steps of one block, by parent and block
  const key = step => `${steps.parent[step]} ${steps.block[step]}`;
  const members = d3.group(d3.range(count), key);
  for (const [a, b] of data.edges) {
    const of = key(a);
    (edgesOf.get(of) || edgesOf.set(of, []).get(of)).push([a, b]);
  }

  function boxOfStep(step) {
    const label = stepLabel(step), box = {step, width: Math.max(70, Math.min(label.length * 7.3 + 16, 200)), height: 36, blocks: []};
    if (!open.has(step)) return box;
    let x = PAD, height = 0;
    for (const block of [...new Set(inner.get(step).map(s => steps.block[s]))]) {
      const content = layOut(`${step} ${block}`);
      box.blocks.push({name: block, x, y: HEAD + 18, content});
      x += Math.max(content.width, 60) + PAD;
      height = Math.max(height, content.height);
    }
    box.width = Math.max(box.width, x);
    box.height = HEAD + 18 + height + PAD;
    return box;
  }

  function layOut(of) {
    const ids = members.get(of) || [], index = new Map(ids.map((s, i) => [s, i]));
    const nodes = ids.map(boxOfStep), edges = edgesOf.get(of) || [];
    return {nodes, edges, ...layered(nodes, edges.map(([a, b]) => [index.get(a), index.get(b)])), index};
  }

  function collect(content, x, y, depth) {
    for (const node of content.nodes) {
      const box = {step: node.step, x: x + node.x, y: y + node.y, width: node.width, height: node.height, depth, blocks: []};
      boxes.push(box);
      boxOf.set(box.step, box);
      for (const block of node.blocks) {
        box.blocks.push([block.name, box.x + block.x, box.y + block.y - 6]);
        collect(block.content, box.x + block.x, box.y + block.y, depth + 1);
      }
    }
    content.edges.forEach(([a, b], i) => {
      const from = boxOf.get(a), to = boxOf.get(b);
      const points = [[from.x + from.width / 2, from.y + from.height], ...content.routes[i].map(([u, v]) => [x + u, y + v]), [to.x + to.width / 2, to.y]];
      const xs = points.map(p => p[0]), ys = points.map(p => p[1]);
      // Curves bend out of the way of boxes on long edges.
      const far = !content.routes[i].length && ys[1] - ys[0] > 120;
      const bend = far ? Math.min(160, 40 + (ys[1] - ys[0]) / 12) : 0;
      curves.push({a, b, points, bend, box: [d3.min(xs) - bend, d3.min(ys), d3.max(xs) + bend, d3.max(ys)]});
    });
  }

  function arrange() {
    boxes = [];
    curves = [];
    boxOf = new Map();
    const content = layOut("-1 ");
    collect(content, 0, 0, 0);
    size = [content.width, content.height];
  }

  // The box that shows a step: its own, or that of a closed step around it.
  function shown(step) {
    while (step >= 0 && !boxOf.has(step)) step = steps.parent[step];
    return step < 0 ? null : boxOf.get(step);
  }

  function draw(context, width, height) {
    const k = transform.k, x0 = -transform.x / k, y0 = -transform.y / k, x1 = x0 + width / k, y1 = y0 + height / k;
    context.translate(transform.x, transform.y);
    context.scale(k, k);
    const chosen = shown(state.step);
    const near = chosen ? new Set([chosen.step]) : new Set();
    const containers = boxes.filter(box => box.blocks.length), plain = boxes.filter(box => !box.blocks.length);
    drawn = 0;
    const drawBox = box => {
      if (box.x > x1 || box.x + box.width < x0 || box.y > y1 || box.y + box.height < y0) return;
      drawn++;
      const faded = state.matches && !state.matches.has(box.step);
      context.globalAlpha = faded ? 0.22 : 1;
      context.fillStyle = box.blocks.length ? (box.depth % 2 ? "#ffffff" : "#f6f8fa") : colourOf(box.step);
      context.fillRect(box.x, box.y, box.width, box.height);
      const on = near.has(box.step);
      context.lineWidth = (on ? 3 : 1) / Math.min(1, Math.max(k, 0.25));
      context.strokeStyle = on ? "#0b5cad" : inner.has(box.step) ? "#57606a" : "#b6bec7";
      if (k > 0.15 || on) context.strokeRect(box.x, box.y, box.width, box.height);
      if (k > 0.35) {
        const label = (inner.has(box.step) ? (open.has(box.step) ? "\u2212 " : "+ ") : "") + stepLabel(box.step);
        context.fillStyle = !box.blocks.length && state.colour !== "backend" && d3.lab(colourOf(box.step)).l < 60 || (state.colour === "backend" && steps.backend[box.step] && !box.blocks.length) ? "#fff" : "#1b1f24";
        context.font = "600 11px system-ui, sans-serif";
        clippedText(context, label, box.x + 7, box.y + 15, box.width - 10, 7.2);
        if (!box.blocks.length) {
          context.font = "10px system-ui, sans-serif";
          clippedText(context, steps.name[box.step], box.x + 7, box.y + 28, box.width - 10, 6.1);
        }
        context.fillStyle = "#57606a";
        context.font = "11px system-ui, sans-serif";
        for (const [name, x, y] of box.blocks) context.fillText(name, x, y);
      }
      context.globalAlpha = 1;
    };
    containers.forEach(drawBox);
    if (k > 0.03) {
      const near = [];
      context.lineWidth = 1 / Math.max(k, 0.4);
      context.strokeStyle = "#8c96a1";
      context.beginPath();
      for (const curve of curves) {
        const [a, b, c, d] = curve.box;
        if (a > x1 || c < x0 || b > y1 || d < y0) continue;
        if (chosen && (curve.a === chosen.step || curve.b === chosen.step)) near.push(curve);
        else trace(context, curve);
      }
      context.stroke();
      context.strokeStyle = "#0b5cad";
      context.lineWidth *= 2.2;
      context.beginPath();
      for (const curve of near) trace(context, curve);
      context.stroke();
    }
    plain.forEach(drawBox);
    context.setTransform(1, 0, 0, 1, 0, 0);
  }

  function trace(context, curve) {
    const p = curve.points;
    context.moveTo(p[0][0], p[0][1]);
    for (let i = 1; i < p.length; i++) {
      const [u, v] = p[i - 1], [x, y] = p[i], half = Math.min(30, Math.abs(y - v) / 2);
      if (curve.bend) context.bezierCurveTo(u + curve.bend, v + 40, x + curve.bend, y - 40, x, y);
      else if (Math.abs(x - u) < 0.5) context.lineTo(x, y);
      else context.bezierCurveTo(u, v + half, x, y - half, x, y);
    }
  }

  function at(event) {
    const [x, y] = transform.invert(d3.pointer(event, surface.canvas));
    let best = null;
    for (const box of boxes) {
      if (x >= box.x && x <= box.x + box.width && y >= box.y && y <= box.y + box.height && (!best || box.depth >= best.depth)) best = box;
    }
    return best;
  }

  function toggle(step) {
    if (!inner.has(step)) return;
    const old = boxOf.get(step), [ox, oy] = [old.x, old.y];
    if (open.has(step)) open.delete(step); else open.add(step);
    arrange();
    const box = boxOf.get(step);  // stays where it was on the screen
    const moved = transform.translate(ox - box.x, oy - box.y);
    d3.select(surface.canvas).call(zoom.transform, moved);
    surface.redraw();
  }

  function fit(all) {
    const {width, height} = surface.canvas.getBoundingClientRect();
    const whole = Math.min(width / (size[0] + 60), height / (size[1] + 60), 1.4);
    const k = all ? whole : Math.max(whole, Math.min(0.9, Math.max(0.45, width / (size[0] + 60))));
    const x = (width - size[0] * k) / 2, y = all ? (height - size[1] * k) / 2 : Math.max(20, (height - size[1] * k) / 2);
    d3.select(surface.canvas).call(zoom.transform, d3.zoomIdentity.translate(x, y).scale(k));
  }

  function reveal(step) {
    for (let p = steps.parent[step]; p >= 0; p = steps.parent[p]) if (!open.has(p)) { open.add(p); arrange(); }
    const box = shown(step);
    if (!surface || !box) return;
    const {width, height} = surface.canvas.getBoundingClientRect(), k = Math.max(transform.k, 0.6);
    const [x, y] = transform.apply([box.x, box.y]);
    if (x > 0 && y > 0 && x + box.width * transform.k < width && y + box.height * transform.k < height && transform.k > 0.35) return surface.redraw();
    const middle = Math.min(box.height / 2, height / 2 / k - 20);
    d3.select(surface.canvas).call(zoom.transform, d3.zoomIdentity.translate(width / 2 - (box.x + box.width / 2) * k, height / 2 - (box.y + middle) * k).scale(k));
    surface.redraw();
  }

  function legend(span) {
    span.replaceChildren();
    if (state.colour === "backend") {
      for (const name of backendColour.domain()) span.append(element("span", {className: "swatch", style: `background:${backendColour(name)}`}), name);
    } else {
      const ramp = element("span", {className: "ramp"});
      ramp.style.background = `linear-gradient(90deg, ${d3.range(0, 1.01, 0.1).map(t => d3.interpolateYlOrRd(0.05 + 0.8 * Math.sqrt(t))).join(",")})`;
      span.append("0", ramp, state.colour === "time" ? format.seconds(mostSeconds) : format.bytes(mostWritten));
    }
  }

  views.graph = {
    title: "Graph",
    open(stage, bar) {
      if (!boxes.length) arrange();
      surface = makeCanvas(stage, draw);
      zoom = d3.zoom().scaleExtent([0.005, 4]).clickDistance(4).on("zoom", event => { transform = event.transform; surface.redraw(); }).filter(event => !event.button);
      const span = element("span");
      bar.append("colour by ");
      pressed(bar, [["time", "time"], ["memory", "memory"], ["backend", "backend"]], state.colour, name => { state.colour = name; legend(span); surface.redraw(); });
      bar.append(span, element("button", {textContent: "fit", onclick: () => fit(true)}));
      if (inner.size) {
        bar.append(
          element("button", {textContent: "open all", onclick: () => { for (const step of inner.keys()) open.add(step); arrange(); fit(false); }}),
          element("button", {textContent: "close all", onclick: () => { open.clear(); arrange(); fit(false); }}));
      }
      bar.append(element("span", {className: "muted", textContent: inner.size ? "drag, scroll; a double click opens sub-graphs" : "drag, scroll"}));
      legend(span);
      const canvas = d3.select(surface.canvas).call(zoom).on("dblclick.zoom", null);
      canvas.on("click", event => { const box = at(event); select(box ? box.step : -1); });
      canvas.on("dblclick", event => { const box = at(event); if (box) toggle(box.step); });
      canvas.on("mousemove", event => {
        const box = at(event);
        showTip(event, box ? stepTip(box.step) : "");
      }).on("mouseleave", event => showTip(event, ""));
      fit(false);
      if (state.step >= 0) reveal(state.step);
    },
    draw: () => surface.redraw(),
    reveal,
  };

  return {
    toggle, reveal,
    get boxes() { return boxes; },
    get drawn() { return drawn; },
    get transform() { return transform; },
    get drawings() { return surface ? surface.drawings : 0; },
    pointOf(step) {  // the middle of the upper edge's line on the screen, for tests
      const box = shown(step), [x, y] = transform.apply([box.x + box.width / 2, box.y + Math.min(12, box.height / 2)]);
      const {left, top} = surface.canvas.getBoundingClientRect();
      return [x + left, y + top];
    },
  };
})();
