// Two runs compared: where their values differ most, and what each took.

const comparison = data.comparison || null;
if (comparison) {
  let table = null;
  const sorting = {key: "relative", down: true}, rows = comparison.values;
  const scientific = x => typeof x === "string" ? x : x === 0 ? "0" : Math.abs(x) >= 1e-2 && Math.abs(x) < 1e5 ? String(+x.toPrecision(6)) : x.toExponential(3);
  const of = key => row => row[key] === undefined ? null : row[key];
  const columns = [
    column("value", "value", 220, row => row.name),
    column("operation", "operation", 150, row => row.operation),
    {...column("relative", "largest / scale", 142, row => row.same_shape ? row.relative : Infinity, scientific), text: row => row.same_shape ? scientific(row.relative) : "other shape"},
    column("largest", "largest", 90, of("largest"), scientific),
    column("scale", "scale", 90, of("scale"), scientific),
    column("index", "at", 110, row => row.index ? `[${row.index.join(", ")}]` : ""),
    column("one", "first", 90, of("one"), scientific),
    column("other", "second", 90, of("other"), scientific),
    column("nonfinite", "NaN, inf", 76, of("nonfinite"), d3.format("d")),
    column("backends", "backends", 130, row => row.backend === row.other_backend ? row.backend : `${row.backend}, ${row.other_backend}`),
    column("seconds", "first took", 90, row => row.seconds, format.seconds),
    column("other_seconds", "second took", 90, row => row.other_seconds, format.seconds),
    column("ratio", "ratio", 70, row => row.seconds && row.other_seconds ? row.other_seconds / row.seconds : null, d3.format(".2f")),
  ];
  views.compare = {
    title: "Compare",
    open(stage, bar) {
      const [one, two] = comparison.labels, [a, b] = comparison.alone_s;
      const dropped = comparison.dropped ? ` ${format.count(comparison.dropped)} were too large to be kept.` : "";
      bar.append(element("span", {innerText: `First: ${one}; ${format.seconds(a)}. Second: ${two}; ${format.seconds(b)}. ${format.count(rows.length)} values of the same name; ${comparison.only[0]} only the first computes, ${comparison.only[1]} only the second.${dropped}`}));
      table = makeTable(stage, columns, rows, row => row.step, sorting);
      if (state.step >= 0) table.reveal(state.step);
    },
    draw: () => table.refresh(),
    reveal: step => table.reveal(step),
  };
}
const differencesOf = new Map();
if (comparison) for (const row of comparison.values) (differencesOf.get(row.step) || differencesOf.set(row.step, []).get(row.step)).push(row);
