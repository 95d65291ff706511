// Shows one problem of PREDICTIONS (predictions.js): the nearest of the grid to what the form asks for. The problem is in
// the address, too: index.html#family=all_gather_gemm&gpu=H200&ranks=4&dtype=bf16&m=8192&n=28672&k=8192
"use strict";

const { rows: ROWS, families: FAMILIES, machines: MACHINES, scales: SCALES } = PREDICTIONS.about;
const START = { family: "all_gather_gemm", gpu: "H200", ranks: "4", dtype: "bf16", m: "8192", n: "28672", k: "8192" };
const LANES = ["latency", "work", "wait", "link"]; // of a variant's numbers, in order; then the corrected time
const NO_LAYER = "other sizes";
const WIDTH = 1000, LEFT = 300, RIGHT = 90, ROW = 44, TOP = 24;
const form = document.getElementById("problem");
const field = (name) => form.elements[name];

function setOptions(name, values) {
  const chosen = field(name).value;
  field(name).replaceChildren(...values.map((value) => new Option(value)));
  if (values.map(String).includes(chosen)) field(name).value = chosen;
}

const unique = (values) => [...new Set(values)];
const layers = () => FAMILIES[field("family").value].pairs.filter(([, , layer]) => layer);
const far = (one, other) => Math.abs(Math.log2(one / other)); // by how many doublings two sizes differ

function nearest(choices, distance) {
  return choices.reduce((best, one) => (distance(one) < distance(best) ? one : best));
}

// The problem of the grid that is nearest to the form's, and its times.
function problem() {
  const [family, dtype] = [field("family").value, field("dtype").value];
  const asked = Object.fromEntries(["m", "n", "k"].map((name) => [name, Number(field(name).value)]));
  const m = nearest(ROWS, (row) => far(row, asked.m));
  const [n, k] = nearest(FAMILIES[family].pairs, ([n, k]) => far(n, asked.n) + far(k, asked.k));
  const [name, machine] = Object.entries(MACHINES).find(
    ([, one]) => one.gpu === field("gpu").value && String(one.ranks) === field("ranks").value);
  const [limit, taken, why, ...times] = PREDICTIONS.times[`${name}/${family}/${dtype}/${n}x${k}`][ROWS.indexOf(m)];
  const variants = FAMILIES[family].variants.map((variant, index) => ({
    ...variant, isTaken: index === taken, times: times[index],
    total: times[index] && times[index][0] + times[index][1] + times[index][2],
  }));
  return { family, dtype, machine, asked, m, n, k, limit, why, variants };
}

function show() {
  if (!form.checkValidity()) return;
  const one = problem();
  const taken = one.variants.find((variant) => variant.isTaken);
  const prediction = one.machine.isMeasured ? "" : " Its constants were not measured but taken from other machines.";
  document.getElementById("taken").replaceChildren("auto takes ", code(taken.name), ` (${one.why})`);
  document.getElementById("shown").textContent =
    `Shown: ${sizes(one)} in ${one.dtype} on ${one.machine.ranks} × ${one.machine.gpu}.${prediction}`;
  sayGrid(one);
  saySnapped(one);
  draw(one);
  list(one);
}

const code = (text) => Object.assign(document.createElement("code"), { textContent: text });
const sizes = ({ m, n, k }) => `M = ${m}, N = ${n}, K = ${k}`;

function sayGrid({ family }) {
  const powers = unique(FAMILIES[family].pairs.filter(([, , layer]) => !layer).map(([n]) => n));
  document.getElementById("grid").textContent = `The grid has M = ${ROWS.join(", ")}, and N and K of the layers or of ` +
    `${powers.join(", ")} each. For other sizes the nearest problem of the grid is shown, by the ratio of sizes, with ` +
    "its own times: they are neither scaled nor interpolated, because times go in steps, as waves of tiles do.";
}

// What is shown in place of sizes that are not on the grid, and the command that predicts these.
function saySnapped({ family, dtype, machine, asked, m, n, k }) {
  const other = Object.entries({ m, n, k }).filter(([name, size]) => size !== asked[name]);
  const said = document.getElementById("snapped");
  said.hidden = !other.length;
  const instead = other.map(([name, size]) => `${name.toUpperCase()} = ${size} for ${asked[name]}`).join(", ");
  const work = (m / asked.m) * (n / asked.n) * (k / asked.k);
  const scales = SCALES[dtype] ? ` --scales ${SCALES[dtype]}` : "";
  said.replaceChildren(`${sizes(asked)} is not on the grid. Shown instead: ${instead}; that is `,
    `${Number(work.toPrecision(2))} times the work. For the sizes as given: `,
    code(`iris-bench explain ${asked.m}x${asked.n}x${asked.k} --family ${family} --gpu ${machine.gpu} ` +
      `--world-size ${machine.ranks} --dtype ${dtype}${scales}`));
}

function svg(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function draw({ variants, limit }) {
  const drawn = variants.filter((variant) => variant.times);
  const fastest = Math.min(...drawn.map((variant) => variant.total));
  // What takes more than three times as long as the fastest is cut off, or it would hide the others.
  const longest = 1.05 * Math.max(limit, ...drawn.map((variant) => Math.min(Math.max(variant.total, variant.times[4]), 3 * fastest)));
  const x = (us) => LEFT + (WIDTH - LEFT - RIGHT) * Math.min(us / longest, 1);
  const height = TOP + ROW * drawn.length + 8;
  const marks = drawn.flatMap((variant, index) => {
    const y = TOP + ROW * index;
    const label = svg("text", { x: 0, y: y + 14, class: variant.isTaken ? "is-taken" : "" }, variant.name + (variant.isTaken ? " ★" : ""));
    label.append(svg("title", {}, variant.summary));
    const who = svg("text", { x: 0, y: y + 29, class: "small" }, variant.agent);
    let start = 0;
    const bars = LANES.slice(0, 3).map((lane, part) => {
      const us = variant.times[part];
      const bar = svg("rect", { class: lane, x: x(start), y: y + 2, width: x(start + us) - x(start), height: 18 });
      bar.append(svg("title", {}, `${lane}: ${us} µs`));
      start += us;
      return bar;
    });
    const link = svg("rect", { class: "link", x: LEFT, y: y + 23, width: x(variant.times[3]) - LEFT, height: 6 });
    const corrected = svg("rect", { fill: "black", x: x(variant.times[4]) - 1.5, y: y - 1, width: 3, height: 24 });
    const cut = variant.total > longest ? "→ " : "";
    const end = svg("text", { x: WIDTH - RIGHT + 8, y: y + 15 }, `${cut}${format(variant.total)} µs`);
    return [label, who, ...bars, link, corrected, end];
  });
  const line = svg("line", { x1: x(limit), x2: x(limit), y1: TOP - 8, y2: height, stroke: "#b5485a", "stroke-dasharray": "5 4" });
  const said = svg("text", { x: x(limit), y: 12, "text-anchor": "middle", class: "small" }, `ideal ${format(limit)} µs`);
  const picture = document.getElementById("lines");
  picture.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
  picture.replaceChildren(...marks, line, said);
}

function list({ variants }) {
  const library = variants[0];
  const header = ["µs", "predicted", ...LANES, "corrected", "over " + library.name, "waits for"];
  const cells = variants.map((variant) => {
    const name = variant.name + (variant.isTaken ? " ★" : "");
    if (!variant.times) return [name, "not modelled here", ...Array(header.length - 3).fill(""), variant.sync];
    const [latency, work, wait, link, corrected] = variant.times;
    const over = `${(library.times[4] / corrected).toFixed(2)}×`;
    return [name, ...[variant.total, latency, work, wait, link, corrected].map(format), over, variant.sync];
  });
  const row = (tag, texts) => {
    const made = document.createElement("tr");
    made.append(...texts.map((text) => Object.assign(document.createElement(tag), { textContent: text })));
    return made;
  };
  document.getElementById("numbers").replaceChildren(row("th", header), ...cells.map((texts) => row("td", texts)));
}

const format = (us) => (us >= 100 ? Math.round(us).toLocaleString("en") : us.toFixed(1));

// The layer that has the sizes of the form, if one has.
function nameLayer() {
  setOptions("layer", [NO_LAYER, ...layers().map(([, , layer]) => layer)]);
  const found = layers().find(([n, k]) => n === Number(field("n").value) && k === Number(field("k").value));
  field("layer").value = found ? found[2] : NO_LAYER;
}

function takeLayer() {
  const found = layers().find(([, , layer]) => layer === field("layer").value);
  if (found) [field("n").value, field("k").value] = found;
}

function fromAddress() {
  const asked = { ...START, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
  for (const name of Object.keys(START)) {
    field(name).value = asked[name];
    if (!field(name).value) field(name).value = START[name]; // what the address says is none of the choices
  }
  nameLayer();
  show();
}

function toAddress() {
  const asked = Object.keys(START).map((name) => [name, field(name).value]);
  history.replaceState(null, "", `#${new URLSearchParams(asked)}`);
}

// Pages are Markdown files beside this folder, and folders on the site that is made of them.
for (const link of document.querySelectorAll("a[data-page]")) {
  const { page, anchor = "" } = link.dataset;
  link.href = `../${page}${location.protocol === "file:" ? ".md" : "/"}${anchor}`;
}
setOptions("family", Object.keys(FAMILIES));
setOptions("gpu", unique(Object.values(MACHINES).map((one) => one.gpu)));
setOptions("dtype", Object.keys(SCALES));
setOptions("ranks", unique(Object.values(MACHINES).map((one) => one.ranks)));
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", (event) => {
  if (event.target.name === "layer") takeLayer();
  nameLayer();
  toAddress();
  show();
});
addEventListener("hashchange", fromAddress);
fromAddress();
