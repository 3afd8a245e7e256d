// Memory over time: areas stacked by owner, and the peak.

const HEADROOM = 1.2; // of the axis above the highest value, for the label of the peak

/** The largest number of bytes that the chart of a run shows. */
function mostOf({ memory, budget_bytes, limit_bytes }) {
  const peaks = (memory?.samples ?? []).map((each) => each.peak_bytes);
  return Math.max(1, budget_bytes ?? 0, limit_bytes ?? 0, memory?.reserved_peak_bytes ?? 0, ...peaks);
}

class MemoryChart extends Chart {
  /** `most` is the largest number of bytes that any chart of the page shows. */
  constructor(host, breakdown, run, owners, most) {
    const phases = run.memory.samples;
    const names = Object.keys(owners).filter((name) => phases.some(({ owned }) => owned[name]));
    let below = phases.map(() => 0);
    const stack = names.map((name) => (below = below.map((low, n) => low + (phases[n].owned[name] ?? 0))));
    const series = { scale: "bytes", paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } };
    const area = (name) => ({
      ...series, fill: filling(owners[name]), stroke: () => css("paper"), width: 0.7,
    });
    const times = [...phases.map((each) => each.begin_s), phases.at(-1).end_s];
    // What is below is drawn over what is above it. The last value lasts until the last time.
    const values = stack.reverse().map((each) => [...each, each.at(-1)]);
    super(host, "Memory over the step, by owner. Arrow keys walk through its phases.", {
      height: host.clientWidth < 480 ? 236 : 306,
      data: [times, ...values],
      series: [{}, ...names.reverse().map(area)],
      scales: { bytes: { range: [0, most * HEADROOM] } },
      side: {
        scale: "bytes", incrs: [...Array(50).keys()].map((n) => 2 ** n), space: 45,
        values: (_, sizes) => sizes.map((size) => formatSize(size).replace(/\.0+ /, " ")),
      },
    });
    Object.assign(this, { breakdown, run, owners, names, phases, most });
    this.tell(null);
  }

  y(bytes, height) {
    return height * (1 - bytes / (this.most * HEADROOM));
  }

  /** The peak, and lines for the budget, the limit of all offloaders, and the allocator's memory. */
  draw(context, width, height) {
    const { memory, budget_bytes, limit_bytes } = this.run;
    const peak = memory.samples[memory.peak];
    // Where freed memory counts, both are what the system has given to the process.
    const reserved = !memory.counts_freed && memory.reserved_peak_bytes > peak.peak_bytes * 1.005;
    const levels = [
      ["budget", budget_bytes],
      ["no offloader gets below", limit_bytes],
      ["taken by the allocator", reserved ? memory.reserved_peak_bytes : null],
    ].filter(([, bytes]) => bytes);
    context.strokeStyle = context.fillStyle = css("mark");
    const isSeen = peak.end_s >= view.begin && peak.begin_s <= view.end;
    if (isSeen) this.drawPeak(context, peak, width, height);
    context.font = font(11, 600);
    context.textAlign = "left";
    for (const [name, bytes] of levels) {
      const y = Math.round(this.y(bytes, height)) + 0.5;
      context.lineWidth = 1.5;
      context.setLineDash([2, 3]);
      context.strokeStyle = css("mark");
      context.strokeRect(-9, y, width + 18, height); // of which only the upper edge is seen
      context.setLineDash([]);
      write(context, `${name} ${formatSize(bytes)}`, 6, y - 4);
    }
  }

  drawPeak(context, peak, width, height) {
    const [x, y] = [this.x(middleOf(peak)), this.y(peak.peak_bytes, height)];
    context.fillRect(x - 0.75, 16, 1.5, Math.max(0, y - 24));
    context.beginPath();
    for (const [right, up] of [[0, 1], [-5, 9], [5, 9]]) context.lineTo(x + right, y - up);
    context.fill();
    context.font = font(12, 700);
    context.textAlign = "center";
    const size = `peak ${formatSize(peak.peak_bytes)}`;
    const whole = `${size} in ${peak.phase}`;
    const text = context.measureText(whole).width < width - 4 ? whole : size; // on a phone
    const half = context.measureText(text).width / 2 + 2;
    write(context, text, Math.min(Math.max(x, half), width - half), 13);
  }

  find(time) {
    return this.phases.find((each) => each.begin_s <= time && each.end_s > time) ?? null;
  }

  walk(phase, right = 0) {
    if (!phase) return this.phases[this.run.memory.peak];
    return this.phases[this.phases.indexOf(phase) + right] ?? phase;
  }

  top() {
    return 0;
  }

  /** Show what memory holds in a phase, or at the peak. The table is the legend of the chart, too. */
  tell(phase) {
    const { memory } = this.run;
    this.breakdown.replaceChildren(this.byOwner(phase ?? memory.samples[memory.peak]));
    if (!phase) return "";
    const lasts = formatSeconds(phase.end_s - phase.begin_s);
    return `${phase.phase}: ${formatSize(phase.peak_bytes)}, lasts ${lasts}`;
  }

  byOwner(phase) {
    const isPeak = phase === this.run.memory.samples[this.run.memory.peak];
    const title = `${isPeak ? "At the peak, in" : "In"} ${phase.phase}: ${formatSize(phase.peak_bytes)}`;
    const rows = this.names.map((name) => {
      const owner = this.owners[name];
      return [owner, owner.label, phase.owned[name] ?? 0];
    });
    return makeSizes(title, rows, phase.peak_bytes);
  }
}

function makeSizes(title, rows, whole) {
  const cells = rows.map(([mark, name, size]) =>
    element(
      "tr", size ? {} : { class: "none" },
      element("td", {}, swatch(mark), name),
      element("td", { class: "size" }, size ? formatSize(size) : "–"),
      element("td", { class: "share" }, size ? `${Math.round((size / whole) * 100)}%` : ""),
    ),
  );
  return element("div", {}, element("h3", {}, title), element("table", {}, element("tbody", {}, ...cells)));
}
