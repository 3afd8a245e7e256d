// Puts charts and tables into the page, and switches between its runs.

function timesOf(run) {
  const events = [...readTable(run.events), ...(run.prediction ? readTable(run.prediction.events) : [])];
  const phases = [...MemoryChart.phasesOf(run), ...MemoryChart.predictedOf(run, [])];
  return [
    ...events.flatMap(({ begin_s, end_s }) => [begin_s, end_s]),
    ...phases.flatMap(({ begin, end }) => [begin, end]),
  ];
}

/** All runs share one window and one scale, so that what looks longer or higher is. */
function makeWindow(runs) {
  let [begin, end] = [0, 0];
  for (const time of runs.flatMap(timesOf)) {
    begin = Math.min(begin, time);
    end = Math.max(end, time);
  }
  return new TimeWindow(begin, end);
}

function fill(article, run, data, window_, most) {
  const find = (selector) => article.querySelector(selector);
  const [memory, lanes] = [find("[data-chart=memory]"), find("[data-chart=lanes]")];
  if (memory) {
    new MemoryChart(memory, run, data.owners, window_, most);
    showBreakdown(find(".breakdown"), run, data.owners);
  }
  if (lanes) new LaneChart(lanes, run, data.events, data.lanes, window_);
  const table = find(".layer-table");
  if (table) new LayerTable(table, readTable(run.layers), window_);
}

function show(which) {
  document.body.classList.toggle("all", which === "all");
  for (const article of document.querySelectorAll(".run")) {
    article.hidden = which !== "all" && article.dataset.run !== which;
  }
}

const data = await unpack(document.querySelector("#data").textContent);
const window_ = makeWindow(data.runs);
const most = Math.max(...data.runs.map(MemoryChart.mostOf));
const articles = document.querySelectorAll(".run");
data.runs.forEach((run, n) => fill(articles[n], run, data, window_, most));

const choices = [...document.querySelectorAll(".switch input")];
for (const choice of choices) choice.addEventListener("change", () => show(choice.value));
if (choices.length) {
  const first = choices.length === 3 ? choices.at(-1) : choices[0]; // two runs: side by side
  first.checked = true;
  show(first.value);
}
document.documentElement.dataset.ready = "";
