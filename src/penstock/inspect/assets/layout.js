// Layered drawings of graphs (Sugiyama, Tagawa and Toda 1981): layers by longest paths, orders by
// barycentres, and positions of a layer that are as close as possible to those of neighbours, which
// is an isotonic regression (pool adjacent violators).

const FAR = 6;  // edges over more layers are drawn past other nodes
const PLACES = 4000;  // unless this many places for them in layers suffice for all

// nodes: [{width, height, first, last}], edges: [[a, b]] by index; sets x and y (the upper left corner)
// of the nodes, and returns {width, height, routes}: for each edge its points between the nodes. A node
// that is first or last is in a layer above or below all others.
function layered(nodes, edges, gapX = 18, gapY = 30) {
  const n = nodes.length;
  const next = nodes.map(() => []), before = nodes.map(() => []);
  for (const [a, b] of edges) if (a !== b) { next[a].push(b); before[b].push(a); }
  const layer = layersOf(n, next, before, nodes);
  // Edges over several layers get a place in each.
  const items = nodes.map((node, i) => ({node: i, layer: layer[i], width: node.width, up: [], down: [], x: 0}));
  const chains = [];
  const far = d3.sum(edges, ([a, b]) => Math.max(0, layer[b] - layer[a] - 1)) <= PLACES ? Infinity : FAR;
  for (const [a, b] of edges) {
    const chain = [];
    chains.push(chain);
    if (a === b || layer[b] - layer[a] > far || layer[b] <= layer[a]) continue;
    let last = items[a];
    for (let l = layer[a] + 1; l < layer[b]; l++) {
      const place = {node: -1, layer: l, width: 6, up: [last], down: [], x: 0};
      last.down.push(place);
      items.push(place);
      chain.push(place);
      last = place;
    }
    last.down.push(items[b]);
    items[b].up.push(last);
  }
  const layers = [];
  for (const item of items) (layers[item.layer] ||= []).push(item);
  for (const row of layers) row.forEach((item, i) => { item.at = i; });
  for (let sweep = 0; sweep < 6; sweep++) {
    const down = sweep % 2 === 0;
    for (let k = 1; k < layers.length; k++) {
      const row = layers[down ? k : layers.length - 1 - k];
      for (const item of row) {
        const near = down ? item.up : item.down;
        item.key = near.length ? d3.mean(near, other => other.at) : item.at;
      }
      row.sort((a, b) => a.key - b.key || a.at - b.at).forEach((item, i) => { item.at = i; });
    }
  }
  for (const row of layers) {
    let x = 0;
    for (const item of row) { item.x = x + item.width / 2; x += item.width + gapX; }
  }
  for (let sweep = 0; sweep < 8; sweep++) {
    for (let k = 0; k < layers.length; k++) {
      const row = layers[sweep % 2 ? layers.length - 1 - k : k];
      place(row, row.map(item => {
        const near = sweep % 2 ? (item.down.length ? item.down : item.up) : (item.up.length ? item.up : item.down);
        return near.length ? d3.mean(near, other => other.x) : item.x;
      }), gapX);
    }
  }
  const left = d3.min(items, item => item.x - item.width / 2) || 0;
  let y = 0;
  const middle = [];
  layers.forEach((row, l) => {
    const height = d3.max(row, item => item.node < 0 ? 0 : nodes[item.node].height) || 0;
    for (const item of row) {
      if (item.node < 0) continue;
      const node = nodes[item.node];
      node.x = item.x - left - node.width / 2;
      node.y = y + (height - node.height) / 2;
    }
    middle[l] = [y, y + height];
    y += height + gapY;
  });
  const routes = chains.map(chain => chain.flatMap(place => middle[place.layer].map(at => [place.x - left, at])));
  return {width: d3.max(nodes, node => node.x + node.width) || 0, height: Math.max(0, y - gapY), routes};
}

// The longest path from a source to each node; what is left in a circle (as frames have) begins anew.
function layersOf(n, next, before, nodes) {
  const layer = new Array(n).fill(0), left = before.map(list => list.length), done = new Array(n).fill(false), queued = new Array(n).fill(false);
  const ready = [];
  for (let i = 0; i < n; i++) if (!left[i]) { queued[i] = true; ready.push(i); }
  let first = 0;
  for (let k = 0; k < n; k++) {
    if (k === ready.length) {
      while (queued[first]) first++;
      left[first] = 0;
      queued[first] = true;
      ready.push(first);
    }
    const i = ready[k];
    done[i] = true;
    for (const j of next[i]) {
      if (done[j]) continue;
      layer[j] = Math.max(layer[j], layer[i] + 1);
      if (left[j] > 0 && --left[j] === 0) { queued[j] = true; ready.push(j); }
    }
  }
  // A source is drawn just above what reads it first.
  for (let i = 0; i < n; i++) {
    if (!before[i].length && next[i].length && !nodes[i].first) layer[i] = Math.max(0, d3.min(next[i], j => layer[j]) - 1);
  }
  const lowest = d3.max(d3.range(n).filter(i => !nodes[i].last), i => layer[i]) || 0;
  for (let i = 0; i < n; i++) if (nodes[i].last) layer[i] = lowest + 1;
  return layer;
}

// Sets x of a row's items as close to the wanted ones as their order and widths allow.
function place(row, wanted, gap) {
  let offset = 0;
  const offsets = row.map((item, i) => {
    if (i) offset += (row[i - 1].width + item.width) / 2 + gap;
    return offset;
  });
  const pools = [];  // [sum, count]
  for (let i = 0; i < row.length; i++) {
    pools.push([wanted[i] - offsets[i], 1]);
    while (pools.length > 1) {
      const last = pools[pools.length - 1], other = pools[pools.length - 2];
      if (other[0] / other[1] <= last[0] / last[1]) break;
      other[0] += last[0];
      other[1] += last[1];
      pools.pop();
    }
  }
  let i = 0;
  for (const [sum, size] of pools) for (let k = 0; k < size; k++, i++) row[i].x = sum / size + offsets[i];
}
