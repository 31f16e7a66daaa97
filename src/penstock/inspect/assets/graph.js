// The graph: boxes of steps; around them those of scopes, and in the box of an If or a loop its blocks.
// A node of the drawing is a step, by its number, or a group: the steps of one scope in one block,
// numbered behind the steps. An area is what is laid out at once: the nodes of a block or of a group.

const graph = (() => {
  const open = new Set();  // nodes whose blocks or members are shown
  const groups = [];  // {name, path, area: the one it is in, members: nodes, all: steps}
  const groupOf = new Array(count).fill(-1);  // the innermost group of a step
  let within = new Map();  // the groups in an area
  let grouped = true, boxes = [], curves = [], size = [0, 0], boxOf = new Map(), laid = new Map(), most = {time: 0, memory: 0};
  let surface = null, transform = d3.zoomIdentity, zoom = null, drawn = 0, group = -1, matched = [null, null];
  const HEAD = 24, PAD = 12, SHOWN = 80;  // of boxes, at first

  const isGroup = id => id >= count;
  const of = id => groups[id - count];
  const blockOf = step => `${steps.parent[step]} ${steps.block[step]}`;
  const blocks = d3.group(d3.range(count), blockOf);

  // Groups. A scope with one node is none, and one that has all of another's nodes is part of it.
  (() => {
    const paths = (data.scopes || []).map(() => null);
    const path = scope => scope < 0 ? [] : paths[scope] ||= [...path(data.scopes[scope][0]), data.scopes[scope][1]];
    const build = (area, ids, depth, before) => {
      const parts = d3.group(ids, s => path(steps.scope[s])[depth]);
      parts.delete(undefined);
      for (const [name, inside] of parts) {
        if (inside.length < 2) continue;
        if (inside.length === ids.length) { build(area, inside, depth + 1, [...before, name]); continue; }
        const id = count + groups.length, own = {path: [...before, name], area, all: inside};
        own.name = own.path.slice(isGroup(+area) ? of(+area).path.length : 0).join("/");
        groups.push(own);
        for (const s of inside) groupOf[s] = id;
        build(String(id), inside, depth + 1, own.path);
      }
    };
    for (const [block, ids] of blocks) build(block, ids, 0, []);
    within = d3.group(groups.map((_, i) => count + i), id => of(id).area);
    groups.forEach((own, i) => {
      own.members = [...own.all.filter(s => groupOf[s] === count + i), ...within.get(String(count + i)) || []];
      own.seconds = d3.sum(own.all, s => seconds[s]);
      own.written = d3.sum(own.all, s => steps.written[s] + steps.workspace[s]);
      own.backend = d3.greatest(d3.rollup(own.all, list => d3.sum(list, s => seconds[s] || 1e-12), s => steps.backend[s]), entry => entry[1])[0];
    });
  })();

  const around = id => isGroup(id) ? of(id).area : grouped && groupOf[id] >= 0 ? String(groupOf[id]) : blockOf(id);
  const holder = area => area.includes(" ") ? +area.split(" ")[0] : +area;  // the node whose area it is, or -1
  const up = id => holder(around(id));
  function nodesOf(area) {
    if (!area.includes(" ")) return of(+area).members;
    const ids = blocks.get(area) || [];
    return grouped ? [...ids.filter(s => groupOf[s] < 0), ...within.get(area) || []] : ids;
  }
  const canOpen = id => isGroup(id) || inner.has(id);

  // Edges between the nodes of each area, and those that lead into and out of groups.
  let edgesOf = new Map();
  function chain(step) {  // the areas of its block that a step is in, the outermost first, and its node in each
    const ids = [step];
    while (around(ids[0]) !== blockOf(step)) ids.unshift(+around(ids[0]));
    return ids;
  }
  const entries = area => edgesOf.get(area) || edgesOf.set(area, {edges: new Map(), enter: new Set(), leave: new Set()}).get(area);
  function connect() {
    edgesOf = new Map();
    const chains = d3.range(count).map(chain);
    for (const [a, b] of data.edges) {
      const from = chains[a], to = chains[b];
      let k = 0;
      while (from[k] === to[k]) k++;
      entries(around(from[k])).edges.set(`${from[k]} ${to[k]}`, [from[k], to[k]]);
      for (let i = k + 1; i < from.length; i++) entries(around(from[i])).leave.add(from[i]);
      for (let i = k + 1; i < to.length; i++) entries(around(to[i])).enter.add(to[i]);
    }
  }

  function contentsOf(id) {
    if (isGroup(id)) return [["", String(id)]];
    return [...new Set(inner.get(id).map(s => steps.block[s]))].map(block => [block, `${id} ${block}`]);
  }

  function label(id) { return isGroup(id) ? of(id).name : stepLabel(id); }

  function boxOfNode(id) {
    const box = {id, width: Math.max(70, Math.min(label(id).length * 7.3 + (canOpen(id) ? 30 : 16), isGroup(id) ? 260 : 200)), height: 36, areas: []};
    if (!open.has(id)) return box;
    const top = HEAD + (isGroup(id) ? 4 : 18);
    let x = PAD, height = 0;
    for (const [name, area] of contentsOf(id)) {
      const content = layOut(area);
      box.areas.push({name, area, x, y: top, content});
      x += Math.max(content.width, 60) + PAD;
      height = Math.max(height, content.height);
    }
    box.width = Math.max(box.width, x);
    box.height = top + height + PAD;
    return box;
  }

  // Lays out the nodes of an area, with a port at its edge for each node that others outside read or feed.
  function layOut(area) {
    if (laid.has(area)) return laid.get(area);
    const ids = nodesOf(area), index = new Map(ids.map((id, i) => [id, i])), nodes = ids.map(boxOfNode);
    const own = entries(area), ends = [...own.edges.values()], links = ends.map(([a, b]) => [index.get(a), index.get(b)]);
    const port = (id, first) => {
      const at = nodes.length;
      nodes.push({width: 4, height: 0, port: true, first, last: !first});
      ends.push(first ? [-1, id] : [id, -1]);
      links.push(first ? [at, index.get(id)] : [index.get(id), at]);
    };
    if (!area.includes(" ")) {
      for (const id of own.enter) port(id, true);
      for (const id of own.leave) port(id, false);
    }
    const drawing = layered(nodes, links), routes = new Map();
    links.forEach(([from, to], i) => {
      const points = drawing.routes[i], a = nodes[from], b = nodes[to];
      if (!points.length && b.y - a.y - a.height > 120) {  // without places in between, past the boxes
        const y = a.y + a.height + 40, bend = Math.min(160, 40 + (b.y - y) / 12), x = Math.max(a.x + a.width / 2, b.x + b.width / 2) + bend;
        points.push([x, y], [x, b.y - 40]);
      }
      if (a.port) points.unshift([a.x + 2, 0]);
      if (b.port) points.push([b.x + 2, drawing.height]);
      routes.set(ends[i].join(" "), points);
    });
    const content = {area, nodes: nodes.filter(node => !node.port), width: drawing.width, height: drawing.height, routes, x: 0, y: 0};
    laid.set(area, content);
    return content;
  }

  function collect(content, x, y, depth) {
    content.x = x;
    content.y = y;
    for (const node of content.nodes) {
      const box = {step: isGroup(node.id) ? -1 : node.id, id: node.id, x: x + node.x, y: y + node.y, width: node.width, height: node.height, depth, blocks: [], opened: node.areas.length > 0};
      boxes.push(box);
      boxOf.set(box.id, box);
      for (const part of node.areas) {
        if (part.name) box.blocks.push([part.name, box.x + part.x, box.y + part.y - 6]);
        collect(part.content, box.x + part.x, box.y + part.y, depth + 1);
      }
    }
  }

  // A curve for each two boxes with edges between steps in them, through the ports of the open groups
  // around both.
  function drawEdges() {
    const seen = new Set(), chains = new Map(), chainOf = step => chains.get(step) || chains.set(step, chain(step)).get(step);
    const route = (a, b, area) => {
      const content = laid.get(area), points = content && content.routes.get(`${a} ${b}`);
      return points ? points.map(([u, v]) => [content.x + u, content.y + v]) : [];
    };
    for (const [a, b] of data.edges) {
      const from = shown(a), to = shown(b);
      if (!from || !to || from === to || seen.has(from.id * 1e6 + to.id)) continue;
      seen.add(from.id * 1e6 + to.id);
      if (from.step >= 0 && from.id !== a || to.step >= 0 && to.id !== b) continue;  // in a closed block
      const up = chainOf(a), down = chainOf(b);
      let k = 0;
      while (up[k] === down[k]) k++;
      const points = [[from.x + from.width / 2, from.y + from.height]], last = up.indexOf(from.id), first = down.indexOf(to.id);
      for (let i = last; i > k; i--) points.push(...route(up[i], -1, around(up[i])));
      const middle = route(up[k], down[k], around(up[k]));
      points.push(...middle);
      for (let i = k + 1; i <= first; i++) points.push(...route(-1, down[i], around(down[i])));
      points.push([to.x + to.width / 2, to.y]);
      const xs = points.map(p => p[0]), ys = points.map(p => p[1]);
      curves.push({a: from.id, b: to.id, points, box: [d3.min(xs), d3.min(ys), d3.max(xs), d3.max(ys)]});
    }
  }

  function arrange() {
    boxes = [];
    curves = [];
    boxOf = new Map();
    const content = layOut("-1 ");
    collect(content, 0, 0, 0);
    drawEdges();
    size = [content.width, content.height];
    const closed = boxes.filter(box => !box.opened);
    most = {time: d3.max(closed, box => amount(box.id, "time")) || 1, memory: d3.max(closed, box => amount(box.id, "memory")) || 1};
  }

  // What was laid out of the areas around a node is so no more.
  function forget(id) {
    for (let area = around(id); ; area = around(holder(area))) {
      laid.delete(area);
      if (holder(area) < 0) return;
    }
  }

  // As many groups as there is room for, the outer ones first.
  function openFirst() {
    let room = SHOWN - nodesOf("-1 ").length, level = nodesOf("-1 ").filter(isGroup);
    while (level.length) {
      const next = [];
      for (const id of d3.sort(level, id => of(id).members.length)) {
        if (of(id).members.length > room) continue;
        room -= of(id).members.length;
        open.add(id);
        next.push(...of(id).members.filter(isGroup));
      }
      level = next;
    }
  }

  function amount(id, colour) {
    if (colour === "time") return isGroup(id) ? of(id).seconds : seconds[id];
    return isGroup(id) ? of(id).written : steps.written[id] + steps.workspace[id];
  }
  function colourOf(id) {
    const backend = isGroup(id) ? of(id).backend : steps.backend[id];
    if (state.colour === "backend") return backend ? backendColour(backend) : "#e5e9ee";
    return d3.interpolateYlOrRd(0.05 + 0.8 * Math.sqrt(Math.min(amount(id, state.colour) / most[state.colour], 1)));
  }

  // The box that shows a step: its own, or that of a closed node around it.
  function shown(id) {
    while (id >= 0 && !boxOf.has(id)) id = up(id);
    return id < 0 ? null : boxOf.get(id);
  }

  function matches(id) {
    if (!state.matches) return true;
    if (!isGroup(id)) return state.matches.has(id);
    if (matched[0] !== state.matches) {
      const ids = new Set();
      for (const step of state.matches) for (let at = up(step); at >= 0; at = up(at)) ids.add(at);
      matched = [state.matches, ids];
    }
    return matched[1].has(id);
  }

  function draw(context, width, height) {
    const k = transform.k, x0 = -transform.x / k, y0 = -transform.y / k, x1 = x0 + width / k, y1 = y0 + height / k;
    context.translate(transform.x, transform.y);
    context.scale(k, k);
    const chosen = shown(group >= 0 ? group : state.step);
    drawn = 0;
    const drawBox = box => {
      if (box.x > x1 || box.x + box.width < x0 || box.y > y1 || box.y + box.height < y0) return;
      drawn++;
      context.globalAlpha = matches(box.id) ? 1 : 0.22;
      const colour = box.opened ? (box.depth % 2 ? "#ffffff" : "#f6f8fa") : colourOf(box.id);
      context.fillStyle = colour;
      const on = box === chosen, round = isGroup(box.id) ? 8 : 0;
      context.lineWidth = (on ? 3 : 1) / Math.min(1, Math.max(k, 0.25));
      context.strokeStyle = on ? "#0b5cad" : canOpen(box.id) ? "#57606a" : "#b6bec7";
      context.beginPath();
      context.roundRect(box.x, box.y, box.width, box.height, round);
      context.fill();
      if (k > 0.15 || on) context.stroke();
      if (k > 0.35) {
        const dark = !box.opened && (state.colour === "backend" ? colour !== "#e5e9ee" : d3.lab(colour).l < 60);
        context.fillStyle = dark ? "#fff" : "#1b1f24";
        context.font = "600 11px system-ui, sans-serif";
        clippedText(context, (canOpen(box.id) ? (box.opened ? "\u2212 " : "+ ") : "") + label(box.id), box.x + 7, box.y + 15, box.width - 10, 7.2);
        if (!box.opened) {
          context.font = "10px system-ui, sans-serif";
          clippedText(context, isGroup(box.id) ? `${format.count(of(box.id).all.length)} steps, ${format.seconds(of(box.id).seconds)}` : steps.name[box.id], box.x + 7, box.y + 28, box.width - 10, 6.1);
        }
        context.fillStyle = "#57606a";
        context.font = "11px system-ui, sans-serif";
        for (const [name, x, y] of box.blocks) context.fillText(name, x, y);
      }
      context.globalAlpha = 1;
    };
    for (const box of boxes) if (box.opened) drawBox(box);
    if (k > 0.03) {
      const near = [];
      context.lineWidth = 1 / Math.max(k, 0.4);
      context.strokeStyle = "#8c96a1";
      context.beginPath();
      for (const curve of curves) {
        const [a, b, c, d] = curve.box;
        if (a > x1 || c < x0 || b > y1 || d < y0) continue;
        if (chosen && (curve.a === chosen.id || curve.b === chosen.id)) near.push(curve);
        else trace(context, curve);
      }
      context.stroke();
      context.strokeStyle = "#0b5cad";
      context.lineWidth *= 2.2;
      context.beginPath();
      for (const curve of near) trace(context, curve);
      context.stroke();
    }
    for (const box of boxes) if (!box.opened) drawBox(box);
    context.setTransform(1, 0, 0, 1, 0, 0);
  }

  function trace(context, curve) {
    const p = curve.points;
    context.moveTo(p[0][0], p[0][1]);
    for (let i = 1; i < p.length; i++) {
      const [u, v] = p[i - 1], [x, y] = p[i], half = Math.min(30, Math.abs(y - v) / 2);
      if (Math.abs(x - u) < 0.5) context.lineTo(x, y);
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

  function toggle(id) {
    if (!canOpen(id)) return;
    const old = boxOf.get(id), [ox, oy] = [old.x, old.y];
    if (open.has(id)) open.delete(id); else open.add(id);
    forget(id);
    arrange();
    const box = boxOf.get(id);  // stays where it was on the screen
    const moved = transform.translate(ox - box.x, oy - box.y);
    d3.select(surface.canvas).call(zoom.transform, moved);
    surface.redraw();
    shownLegend();
  }

  function fit(all) {
    const {width, height} = surface.canvas.getBoundingClientRect();
    const whole = Math.min(width / (size[0] + 60), height / (size[1] + 60), 1.4);
    const k = all ? whole : Math.max(whole, Math.min(0.9, Math.max(0.45, width / (size[0] + 60))));
    const x = (width - size[0] * k) / 2, y = all ? (height - size[1] * k) / 2 : Math.max(20, (height - size[1] * k) / 2);
    d3.select(surface.canvas).call(zoom.transform, d3.zoomIdentity.translate(x, y).scale(k));
  }

  function reveal(step) {
    group = -1;
    let opened = false;
    for (let id = up(step); id >= 0; id = up(id)) if (!open.has(id)) { open.add(id); forget(id); opened = true; }
    if (opened) { arrange(); shownLegend(); }
    const box = shown(step);
    if (!surface || !box) return;
    const {width, height} = surface.canvas.getBoundingClientRect(), k = Math.max(transform.k, 0.6);
    const [x, y] = transform.apply([box.x, box.y]);
    if (x > 0 && y > 0 && x + box.width * transform.k < width && y + box.height * transform.k < height && transform.k > 0.35) return surface.redraw();
    const middle = Math.min(box.height / 2, height / 2 / k - 20);
    d3.select(surface.canvas).call(zoom.transform, d3.zoomIdentity.translate(width / 2 - (box.x + box.width / 2) * k, height / 2 - (box.y + middle) * k).scale(k));
    surface.redraw();
  }

  function chooseGroup(id) {
    select(-1);
    group = id;
    const own = of(id), list = element("dl"), row = (title, value) => list.append(element("dt", {textContent: title}), element("dd", {textContent: value}));
    details.replaceChildren(element("h2", {textContent: own.name}), list);
    row("scope", own.path.join("/"));
    row("steps", format.count(own.all.length));
    row("time", `${format.seconds(own.seconds)} a run` + (totalSeconds ? `, ${format.share(own.seconds / totalSeconds)}` : ""));
    row("writes", format.bytes(own.written));
    row("backends", [...new Set(own.all.map(s => steps.backend[s]))].filter(name => name).join(", "));
    const longest = own.all.filter(s => !inner.has(s)).sort((a, b) => seconds[b] - seconds[a]).slice(0, 12);
    details.append(element("h3", {textContent: "longest steps"}), element("ul", {}, ...longest.map(s => element("li", {}, element("a", {textContent: stepLabel(s), onclick: () => select(s)}), ` ${format.seconds(seconds[s])}`))));
    surface.redraw();
  }

  let legendSpan = null;
  function shownLegend() {
    const span = legendSpan;
    if (!span) return;
    span.replaceChildren();
    if (state.colour === "backend") {
      for (const name of backendColour.domain()) span.append(element("span", {className: "swatch", style: `background:${backendColour(name)}`}), name);
    } else {
      const ramp = element("span", {className: "ramp"});
      ramp.style.background = `linear-gradient(90deg, ${d3.range(0, 1.01, 0.1).map(t => d3.interpolateYlOrRd(0.05 + 0.8 * Math.sqrt(t))).join(",")})`;
      span.append("0", ramp, state.colour === "time" ? format.seconds(most.time) : format.bytes(most.memory));
    }
  }

  function rearrange(change) {
    change();
    group = -1;
    laid = new Map();
    connect();
    arrange();
    shownLegend();
    fit(false);
  }

  connect();
  openFirst();

  views.graph = {
    title: "Graph",
    open(stage, bar) {
      if (!boxes.length) arrange();
      surface = makeCanvas(stage, draw);
      zoom = d3.zoom().scaleExtent([0.005, 4]).clickDistance(4).on("zoom", event => { transform = event.transform; surface.redraw(); }).filter(event => !event.button);
      legendSpan = element("span");
      bar.append("colour by ");
      pressed(bar, [["time", "time"], ["memory", "memory"], ["backend", "backend"]], state.colour, name => { state.colour = name; shownLegend(); surface.redraw(); });
      bar.append(legendSpan, element("button", {textContent: "fit", onclick: () => fit(true)}));
      if (groups.length) {
        const button = element("button", {textContent: "scopes", title: "group steps by the scopes in their names", onclick: () => {
          rearrange(() => { grouped = !grouped; });
          button.setAttribute("aria-pressed", grouped);
        }});
        button.setAttribute("aria-pressed", grouped);
        bar.append(button);
      }
      if (inner.size || groups.length) {
        bar.append(
          element("button", {textContent: "open all", onclick: () => rearrange(() => { for (const id of [...inner.keys(), ...groups.map((_, i) => count + i)]) open.add(id); })}),
          element("button", {textContent: "close all", onclick: () => rearrange(() => open.clear())}));
      }
      bar.append(element("span", {className: "muted", textContent: inner.size || groups.length ? "drag, scroll; a double click opens and closes boxes with +" : "drag, scroll"}));
      shownLegend();
      const canvas = d3.select(surface.canvas).call(zoom).on("dblclick.zoom", null);
      canvas.on("click", event => {
        const box = at(event);
        group = -1;
        if (box && isGroup(box.id)) chooseGroup(box.id);
        else select(box ? box.step : -1);
        surface.redraw();
      });
      canvas.on("dblclick", event => { const box = at(event); if (box) toggle(box.id); });
      canvas.on("mousemove", event => {
        const box = at(event);
        showTip(event, !box ? "" : isGroup(box.id) ? `${of(box.id).path.join("/")}\n${format.count(of(box.id).all.length)} steps, ${format.seconds(of(box.id).seconds)}, writes ${format.bytes(of(box.id).written)}` : stepTip(box.step));
      }).on("mouseleave", event => showTip(event, ""));
      fit(false);
      if (state.step >= 0) reveal(state.step);
    },
    draw: () => surface.redraw(),
    reveal,
  };

  return {
    toggle, reveal, groups, matches,
    get boxes() { return boxes; },
    get drawn() { return drawn; },
    get curves() { return curves; },
    get transform() { return transform; },
    get drawings() { return surface ? surface.drawings : 0; },
    groupNamed: name => { const i = groups.findIndex(own => own.path.join("/") === name); return i < 0 ? -1 : count + i; },
    pointOf(id) {  // the middle of the upper edge's line on the screen, for tests
      const box = shown(id), [x, y] = transform.apply([box.x + box.width / 2, box.y + Math.min(12, box.height / 2)]);
      const {left, top} = surface.canvas.getBoundingClientRect();
      return [x + left, y + top];
    },
  };
})();
