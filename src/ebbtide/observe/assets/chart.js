// Charts over time, which uPlot draws. All of a page show the same stretch of time.

const AXIS = 24; // height of the axis of time
const HEAD = 7; // above a chart: half the height of a label at its upper edge
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const HINT = "Point at something, or go to it with the arrow keys.";

const view = { whole: [0, 1], begin: 0, end: 1, layer: null, charts: [] };

function show(begin, end) {
  const [first, last] = view.whole;
  const length = Math.min(Math.max(end - begin, (last - first) * 1e-6), last - first);
  view.begin = Math.min(Math.max(begin, first), last - length);
  view.end = view.begin + length;
  for (const chart of view.charts) chart.update();
}

/** Make the stretch `factor` times as long; the time `around` keeps its place. */
function zoom(factor, around = (view.begin + view.end) / 2) {
  show(around - (around - view.begin) * factor, around + (view.end - around) * factor);
}

/** Move by a share of what is seen; to the right if it is positive. */
function move(share) {
  const by = (view.end - view.begin) * share;
  show(view.begin + by, view.end + by);
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function font(size, weight = 400) {
  return `${weight} ${size}px system-ui, "Noto Sans", sans-serif`;
}

/** What to fill an area with: a colour, or a colour with white hatching. */
function filling({ colour, hatched }) {
  if (!hatched) return colour;
  const tile = new OffscreenCanvas(8, 8);
  const pen = tile.getContext("2d");
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = "#ffffff99";
  pen.lineWidth = 1.4;
  for (const shift of [-8, 0, 8]) {
    pen.moveTo(shift - 1, 9);
    pen.lineTo(shift + 9, -1);
  }
  pen.stroke();
  return pen.createPattern(tile, "repeat");
}

/** Text that is legible on whatever it is drawn over. */
function write(context, text, x, y, ink = css("ink"), ground = css("paper")) {
  context.lineWidth = 4;
  context.lineJoin = "round";
  context.strokeStyle = ground;
  context.strokeText(text, x, y);
  context.fillStyle = ink;
  context.fillText(text, x, y);
}

/**
 * A subclass has `draw(context, width, height)`, `find(time, y)` which returns an item with `begin_s`
 * and `end_s` or null, `walk(item, right, down)` which returns the item that the arrow keys lead to,
 * `top(item)`, and `tell(item)` which shows an item, or null, and returns words for it.
 */
class Chart {
  constructor(host, label, { height, side, data, ...options }) {
    this.item = null;
    this.range = element("span", { class: "range" });
    this.said = element("p", { class: "said", "aria-live": "polite" }, HINT);
    const left = host.clientWidth < 480 ? 66 : 86;
    const axis = { stroke: () => css("quiet"), grid: { stroke: () => css("grid"), width: 1 } };
    const ticks = { show: false };
    const times = { ...axis, size: AXIS, gap: 4, font: font(11), values: writeTimes, ticks };
    host.append(this.makeTools());
    this.plot = new uPlot(
      {
        width: host.clientWidth || 600, height: HEAD + height + AXIS, padding: [HEAD, 20, 0, 0],
        legend: { show: false },
        cursor: {
          y: false, points: { show: false }, drag: { setScale: false },
          sync: { key: "page", filters: { pub: (type) => type === "mousemove" } },
          bind: { dblclick: () => () => show(...view.whole) },
        },
        axes: [times, { ...axis, size: left, gap: 6, font: font(11), ticks, ...side }],
        hooks: {
          draw: [() => this.paint()],
          setSelect: [({ select }) => this.select(select)],
          setCursor: [({ cursor: { left: x, top: y } }) => this.point(x, y)],
        },
        ...options,
        scales: { x: { time: false }, ...options.scales },
      },
      data,
      host,
    );
    host.append(this.said);
    this.listen(label);
    view.charts.push(this);
    new ResizeObserver(() => {
      // A run that is not shown has no width.
      if (host.clientWidth) this.plot.setSize({ width: host.clientWidth, height: HEAD + height + AXIS });
    }).observe(host);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plot.redraw());
  }

  makeTools() {
    const actions = [
      ["+", "Zoom in", () => zoom(0.5)],
      ["−", "Zoom out", () => zoom(2)],
      ["←", "Earlier", () => move(-0.4)],
      ["→", "Later", () => move(0.4)],
      ["All", "Show the whole step", () => show(...view.whole)],
    ];
    const buttons = actions.map(([text, label, act]) => {
      const button = element("button", { type: "button", "aria-label": label, title: label }, text);
      button.addEventListener("click", act);
      return button;
    });
    return element("div", { class: "tools" }, ...buttons, this.range);
  }

  listen(label) {
    const { root, over } = this.plot;
    root.tabIndex = 0;
    root.setAttribute("role", "application");
    root.setAttribute("aria-label", label);
    root.addEventListener("keydown", (event) => this.press(event));
    over.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    for (const name of ["touchstart", "touchend"]) {
      over.addEventListener(name, ({ touches }) => (this.held = this.sharesOf(touches).map(timeAt)));
    }
    over.addEventListener("touchmove", ({ touches }) => this.drag(this.sharesOf(touches)));
  }

  sharesOf(touches) {
    const { left, width } = this.plot.over.getBoundingClientRect();
    return [...touches].map(({ clientX }) => (clientX - left) / width);
  }

  /** The times under the fingers stay there: one finger moves, two zoom. */
  drag([first, second]) {
    const [begin, end] = this.held;
    const length = second === undefined ? view.end - view.begin : (end - begin) / (second - first);
    if (length > 0) show(begin - first * length, begin + (1 - first) * length);
  }

  select({ left, width }) {
    const length = this.plot.over.clientWidth;
    if (width > 5) show(timeAt(left / length), timeAt((left + width) / length));
    this.plot.setSelect({ left: 0, width: 0 }, false);
  }

  wheel(event) {
    const { offsetX, deltaX, deltaY, ctrlKey, metaKey, shiftKey } = event;
    const width = this.plot.over.clientWidth;
    const sideways = shiftKey || Math.abs(deltaX) > Math.abs(deltaY);
    if (ctrlKey || metaKey) zoom(Math.exp(deltaY * 0.005), timeAt(offsetX / width));
    else if (sideways) move((deltaX || deltaY) / width);
    else return; // the page scrolls
    event.preventDefault();
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { key, shiftKey } = event;
    const [right, down] = ARROWS[key] ?? [];
    if (right && shiftKey) move(right * 0.2);
    else if (right || down) this.goTo(this.walk(this.item, right, down));
    else if (key === "+" || key === "=") zoom(0.5, this.item ? middleOf(this.item) : undefined);
    else if (key === "-") zoom(2, this.item ? middleOf(this.item) : undefined);
    else if (key === "0" || key === "Home") show(...view.whole);
    else if (key === "Escape") this.choose(null);
    else return;
    event.preventDefault();
  }

  goTo(item) {
    const length = view.end - view.begin;
    if (item.end_s > view.end) move((item.end_s - view.end) / length + 0.1);
    if (item.begin_s < view.begin) move((item.begin_s - view.begin) / length - 0.1);
    const left = ((middleOf(item) - view.begin) / length) * this.plot.over.clientWidth;
    this.plot.setCursor({ left, top: this.top(item) }, true, true);
    this.choose(item); // whatever else is at that place
  }

  point(x, y) {
    this.choose(x < 0 ? null : this.find(timeAt(x / this.plot.over.clientWidth), y));
  }

  choose(item) {
    if (item === this.item) return;
    this.item = item;
    this.said.textContent = this.tell(item) || HINT;
    this.plot.redraw(false);
  }

  update() {
    this.plot.batch(() => this.plot.setScale("x", { min: view.begin, max: view.end }));
    const [length, whole] = [view.end - view.begin, view.whole[1] - view.whole[0]];
    const from = length < whole * (1 - 1e-9) ? `from ${formatSeconds(view.begin)}` : "the whole step";
    this.range.textContent = `${from}, ${formatSeconds(length)}`;
  }

  /** Draw over what uPlot has drawn, in pixels of the page from the corner of the plot. */
  paint() {
    const { ctx: context, bbox } = this.plot;
    context.save();
    context.beginPath();
    context.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    context.clip();
    context.translate(bbox.left, bbox.top);
    context.scale(uPlot.pxRatio, uPlot.pxRatio);
    this.width = bbox.width / uPlot.pxRatio;
    this.draw(context, this.width, bbox.height / uPlot.pxRatio);
    context.restore();
  }

  x(time) {
    return ((time - view.begin) / (view.end - view.begin)) * this.width;
  }
}

/** The middle of what is seen of an item. */
function middleOf({ begin_s, end_s }) {
  return (Math.max(begin_s, view.begin) + Math.min(end_s, view.end)) / 2;
}

/** The time at a share of what is seen. */
function timeAt(share) {
  return view.begin + share * (view.end - view.begin);
}

function writeTimes(_, times) {
  const [unit, length] = TIMES.find(([, each]) => view.whole[1] >= each) ?? TIMES.at(-1);
  return times.map((time) => `${Number((time / length).toPrecision(10))} ${unit}`);
}
