// Puts charts and tables into the page, and switches between its runs.

function timesOf({ traceEvents, ebbtide: { memory } }) {
  const spans = memory?.samples ?? [];
  const events = traceEvents.filter(({ ts }) => ts !== undefined);
  return [
    ...spans.flatMap(({ begin_s, end_s }) => [begin_s, end_s]),
    ...events.flatMap(({ ts, dur }) => [ts / 1e6, (ts + (dur ?? 0)) / 1e6]),
  ];
}

function fill(article, run, data, most) {
  const find = (selector) => article.querySelector(selector);
  const [memory, lanes] = [find("[data-chart=memory]"), find("[data-chart=lanes]")];
  const layers = find(".layer-table");
  if (memory) new MemoryChart(memory, find(".breakdown"), run.ebbtide, data.owners, most);
  if (lanes) new LaneChart(lanes, run, data.events, data.lanes);
  if (layers) new LayerTable(layers, run.ebbtide.layers);
  find(".perfetto")?.addEventListener("click", () => openInPerfetto(run));
}

function showRun(which) {
  document.body.classList.toggle("all", which === "all");
  for (const article of document.querySelectorAll(".run")) {
    article.hidden = which !== "all" && article.dataset.run !== which;
  }
}

const data = await unpack(document.querySelector("#data").textContent);
// All runs have the same scales, so that what looks longer or higher is.
const times = data.runs.flatMap(timesOf);
const least = times.reduce((a, b) => Math.min(a, b), times[0] ?? 0);
view.whole = [least, times.reduce((a, b) => Math.max(a, b), least + 1e-9)];
const most = Math.max(...data.runs.map(({ ebbtide }) => mostOf(ebbtide)));
const articles = document.querySelectorAll(".run");
data.runs.forEach((run, n) => fill(articles[n], run, data, most));
show(...view.whole);

const choices = [...document.querySelectorAll(".switch input")];
for (const choice of choices) choice.addEventListener("change", () => showRun(choice.value));
if (choices.length) {
  const first = choices.length === 3 ? choices.at(-1) : choices[0]; // two runs: side by side
  first.checked = true;
  showRun(first.value);
}
document.documentElement.dataset.ready = "";
