// What holds the views together: tabs, the selected step and its details, the search, the address.

const stage = document.getElementById("stage"), bar = document.getElementById("bar"), details = document.getElementById("details");
const search = document.getElementById("search"), found = document.getElementById("found"), nav = document.querySelector("nav");

function show(name) {
  if (!views[name] || state.view === name) return;
  state.view = name;
  for (const tab of nav.children) tab.setAttribute("aria-selected", tab.dataset.view === name);
  stage.replaceChildren();
  bar.replaceChildren();
  showTip(null, "");
  views[name].open(stage, bar);
  remember();
}

function select(step) {
  if (step === state.step) return;
  state.step = step;
  showDetails(step);
  if (step >= 0) views[state.view].reveal(step);
  views[state.view].draw();
  remember();
}

function remember() {
  const text = `#${state.view}` + (state.step >= 0 ? `/${state.step + 1}` : "");
  try { history.replaceState(null, "", text); } catch { /* a page without an address of its own */ }
}

function slotItem(slot, others) {
  const item = element("li", {}, `${slots.name[slot]}: ${slots.type[slot]} `, element("span", {className: "muted", textContent: slots.memory[slot]}));
  for (const other of others.slice(0, 12)) item.append(" ", element("a", {textContent: stepLabel(other), onclick: () => select(other)}));
  if (others.length > 12) item.append(` and ${others.length - 12} more`);
  return item;
}

function showDetails(step) {
  details.replaceChildren();
  if (step < 0) return showSummary();
  const list = element("dl"), row = (title, value) => { if (value !== "" && value !== null) list.append(element("dt", {textContent: title}), element("dd", {}, value)); };
  details.append(element("h2", {textContent: stepLabel(step)}), list);
  row("name", steps.name[step]);
  row("from", steps.origin[step]);
  row("scope", scopeOf(step));
  if (steps.parent[step] >= 0) row("in", element("a", {textContent: `${steps.block[step]} of ${stepLabel(steps.parent[step])}`, onclick: () => select(steps.parent[step])}));
  row("backend", steps.backend[step]);
  row("why", steps.reason[step]);
  row("dtype", steps.precision[step]);
  row("time", `${format.seconds(seconds[step])} a run` + (totalSeconds ? `, ${format.share(seconds[step] / totalSeconds)}` : "") + (steps.count[step] !== 1 ? `, ${d3.format("~r")(steps.count[step])} times` : ""));
  if (steps.flops[step]) row("work", `${format.si(steps.flops[step])}FLOP` + (rate("flops", step) ? `, ${format.si(rate("flops", step))}FLOP/s` : ""));
  if (steps.bytes[step]) row("moves", format.bytes(steps.bytes[step]) + (rate("bytes", step) ? `, ${format.si(rate("bytes", step))}B/s` : ""));
  if (reached(step) !== null) row("of roof", format.share(reached(step)));
  row("writes", format.bytes(steps.written[step]));
  if (steps.workspace[step]) row("workspace", format.bytes(steps.workspace[step]));
  const section = (title, items) => { if (items.length) details.append(element("h3", {textContent: title}), element("ul", {}, ...items)); };
  section("fused nodes", steps.nodes[step].map(name => element("li", {textContent: name})));
  section("inputs", steps.inputs[step].map(slot => slotItem(slot, maker[slot] >= 0 && maker[slot] !== step ? [maker[slot]] : [])));
  section("outputs", steps.outputs[step].map(slot => slotItem(slot, readers[slot])));
  section("differences", (differencesOf.get(step) || []).map(row => element("li", {textContent: row.same_shape ? `${row.name}: ${row.largest} at [${row.index.join(", ")}]` : `${row.name}: other shape`})));
}

function showSummary() {
  const list = element("dl"), row = (title, value) => list.append(element("dt", {textContent: title}), element("dd", {textContent: value}));
  details.append(element("h2", {textContent: data.title}), list);
  row("plan", `${data.plan}, ${format.count(count)} steps`);
  row("runs with", data.about);
  for (const name in data.feeds) row(`input ${name}`, data.feeds[name]);
  row("a run", `${format.seconds(data.alone_s)}, ${format.seconds(data.observed_s)} observed`);
  row("constants", format.bytes(data.constant_bytes));
  if (data.arena) row("arena", format.bytes(data.arena.size));
  row("made by", `penstock ${data.version}`);
  const longest = d3.range(count).filter(s => !inner.has(s)).sort((a, b) => seconds[b] - seconds[a]).slice(0, 8);
  details.append(element("h3", {textContent: "longest steps"}), element("ul", {}, ...longest.map(s => element("li", {}, element("a", {textContent: stepLabel(s), onclick: () => select(s)}), ` ${format.seconds(seconds[s])}`))));
}

// Search.

const texts = d3.range(count).map(s => [steps.name[s], steps.operation[s], steps.origin[s], steps.backend[s], ...steps.nodes[s], ...steps.outputs[s].map(slot => slots.name[slot])].join("\n").toLowerCase());

function find(query) {
  state.query = query.trim().toLowerCase();
  const list = state.query ? d3.range(count).filter(s => texts[s].includes(state.query)) : [];
  state.matches = state.query ? new Set(list) : null;
  found.hidden = !state.query;
  found.replaceChildren(...list.slice(0, 100).map(s => {
    const item = element("li", {textContent: `${stepLabel(s)}  ${steps.name[s]}`, onclick: () => { select(s); found.hidden = true; }});
    item.dataset.step = s;
    return item;
  }));
  if (state.query) found.append(element("li", {className: "none", textContent: list.length ? `${format.count(list.length)} steps` : "no step has this"}));
  views[state.view].draw();
  return list;
}

let chosen = -1;
search.oninput = () => { chosen = -1; find(search.value); };
search.onfocus = () => { if (state.query) found.hidden = false; };
search.onkeydown = event => {
  const items = [...found.children].filter(item => item.dataset.step);
  if (event.key === "Escape") { search.value = ""; find(""); }
  if (!items.length || !["Enter", "ArrowDown", "ArrowUp"].includes(event.key)) return;
  event.preventDefault();
  chosen = (chosen + (event.key === "ArrowUp" ? -1 : 1) + items.length) % items.length;
  items.forEach((item, i) => item.classList.toggle("on", i === chosen));
  items[chosen].scrollIntoView({block: "nearest"});
  select(+items[chosen].dataset.step);
};
document.addEventListener("click", event => { if (!event.target.closest("#finder")) found.hidden = true; });

document.getElementById("about").textContent = data.about;
document.getElementById("about").title = data.about;
for (const name in views) {
  const tab = element("button", {textContent: views[name].title, onclick: () => show(name)});
  tab.dataset.view = name;
  tab.setAttribute("role", "tab");
  nav.append(tab);
}
function go() {
  const [name, number] = location.hash.slice(1).split("/");
  const step = number ? Math.min(Math.max(parseInt(number, 10) - 1, -1), count - 1) : -1;
  state.step = Number.isNaN(step) ? -1 : step;
  showDetails(state.step);
  show(views[name] ? name : "graph");
}
addEventListener("hashchange", () => { const [name] = location.hash.slice(1).split("/"); if (name !== state.view) state.view = ""; go(); if (state.step >= 0) views[state.view].reveal(state.step); });
go();
window.report = {data, state, graph, timeline, memory, roofline, stepTable, select, show, find};
