// What charts over time have in common: a canvas that zooms, its axis, and what is pointed at.
//
// A subclass has `draw(context)`, `height()`, `find(x, y)` which returns an item or null,
// `walk(chosen, right, down)` which returns the item that the arrow keys lead to, `spanOf(item)`,
// which returns its begin and end, and `describe(item)`, which returns a title and rows.

const DRAG = 5; // pixels; a shorter drag is a click
const AXIS = 24; // height of the axis of time

class Chart {
  constructor(host, label, window_) {
    this.host = host;
    this.window = window_;
    this.chosen = null;
    this.drag = null; // where a mouse began to drag, and where it is
    this.touches = new Map();
    this.canvas = element("canvas", { tabindex: 0, role: "application", "aria-label": label });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.spoken = element("div", { class: "unseen", "aria-live": "polite" });
    this.range = element("span", { class: "range" });
    host.append(this.makeTools(), this.canvas, this.tip, this.spoken);
    this.listen();
    window_.listeners.push(() => this.redraw());
    new ResizeObserver(() => this.redraw()).observe(host);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    this.redraw();
  }

  makeTools() {
    const tools = element("div", { class: "tools" });
    const add = (text, label, act) => {
      const button = element("button", { type: "button", "aria-label": label, title: label }, text);
      button.addEventListener("click", act);
      tools.append(button);
    };
    add("+", "Zoom in", () => this.window.zoom(0.5));
    add("−", "Zoom out", () => this.window.zoom(2));
    add("←", "Earlier", () => this.window.move(-0.4));
    add("→", "Later", () => this.window.move(0.4));
    add("All", "Show the whole step", () => this.window.showAll());
    tools.append(this.range);
    return tools;
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.moveTo(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", (event) => this.touches.delete(event.pointerId));
    canvas.addEventListener("pointerleave", (event) => this.leave(event));
    canvas.addEventListener("dblclick", () => this.window.showAll());
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.pressKey(event));
    canvas.addEventListener("blur", () => this.choose(null));
  }

  // ---- where things are ------------------------------------------------------------------------

  get left() {
    return this.host.clientWidth < 480 ? 66 : 86;
  }

  get width() {
    return Math.max(20, this.host.clientWidth - this.left - 8);
  }

  x(time) {
    return this.left + ((time - this.window.begin) / this.window.length) * this.width;
  }

  timeAt(x) {
    return this.window.begin + ((x - this.left) / this.width) * this.window.length;
  }

  // ---- pointers and keys -----------------------------------------------------------------------

  press(event) {
    this.canvas.setPointerCapture(event.pointerId);
    if (event.pointerType === "mouse") {
      if (event.button === 0) this.drag = { from: event.offsetX, to: event.offsetX };
      return;
    }
    this.touches.set(event.pointerId, { x: event.offsetX, began: event.offsetX });
  }

  moveTo(event) {
    const x = event.offsetX;
    const touch = this.touches.get(event.pointerId);
    if (touch) {
      this.moveTouch(touch, x);
    } else if (this.drag) {
      this.drag.to = x;
      this.redraw();
    } else {
      this.point(x, event.offsetY);
    }
  }

  moveTouch(touch, x) {
    const before = touch.x;
    const others = [...this.touches.values()].filter((each) => each !== touch);
    touch.x = x;
    if (!others.length) {
      this.window.move((before - x) / this.width);
      return;
    }
    const other = others[0].x;
    const [was, is] = [Math.abs(before - other), Math.abs(x - other)];
    if (was > 8 && is > 8) this.window.zoom(was / is, this.timeAt(other));
  }

  release(event) {
    const touch = this.touches.get(event.pointerId);
    this.touches.delete(event.pointerId);
    const { drag } = this;
    this.drag = null;
    if (drag && Math.abs(drag.to - drag.from) > DRAG) {
      const times = [this.timeAt(drag.from), this.timeAt(drag.to)].sort((a, b) => a - b);
      this.window.show(...times);
    } else if (drag || (touch && Math.abs(touch.x - touch.began) <= DRAG)) {
      this.point(event.offsetX, event.offsetY);
    }
  }

  leave(event) {
    if (event.pointerType !== "mouse" || this.drag) return;
    this.choose(null);
    this.window.pointAt(null);
  }

  wheel(event) {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (event.ctrlKey || event.metaKey) {
      this.window.zoom(Math.exp(event.deltaY * 0.005), this.timeAt(event.offsetX));
    } else if (sideways) {
      this.window.move((event.deltaX || event.deltaY) / this.width);
    } else {
      return; // the page scrolls
    }
    event.preventDefault();
  }

  pressKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const { key, shiftKey } = event;
    if (arrows[key] && shiftKey) this.window.move(arrows[key][0] * 0.2);
    else if (arrows[key]) this.walkOn(...arrows[key]);
    else if (key === "+" || key === "=") this.window.zoom(0.5, this.middleOfChosen());
    else if (key === "-") this.window.zoom(2, this.middleOfChosen());
    else if (key === "0" || key === "Home") this.window.showAll();
    else if (key === "Escape") this.choose(null);
    else return;
    event.preventDefault();
  }

  middleOfChosen() {
    if (!this.chosen) return undefined;
    const [begin, end] = this.spanOf(this.chosen);
    return Math.min(Math.max((begin + end) / 2, this.window.begin), this.window.end);
  }

  walkOn(right, down) {
    const item = this.walk(this.chosen, right, down);
    if (!item) return;
    this.window.reveal(...this.spanOf(item));
    this.choose(item);
    const { title, rows } = this.describe(item);
    this.spoken.textContent = [title, ...rows.map((row) => row.slice(-2).join(" "))].join(", ");
  }

  point(x, y) {
    const inside = x >= this.left && x <= this.left + this.width;
    this.choose(inside ? this.find(x, y) : null, x, y);
    this.window.pointAt(inside ? this.timeAt(x) : null);
  }

  /** Show what there is to say of an item, at a place or beside the item. */
  choose(item, x, y) {
    this.chosen = item;
    this.tip.hidden = !item;
    if (item) {
      this.fillTip(this.describe(item));
      const [begin, end] = this.spanOf(item);
      const middle = Math.max(this.x(begin), this.left) + Math.min(this.x(end), this.left + this.width);
      this.placeTip(x ?? middle / 2, y ?? this.tipTop(item));
    }
    this.redraw();
  }

  tipTop() {
    return 30;
  }

  fillTip({ title, rows }) {
    const body = rows.map(([mark, name, value]) => {
      const label = element("td", {}, ...(mark ? [swatch(mark)] : []), name);
      return element("tr", {}, label, element("td", {}, value));
    });
    this.tip.replaceChildren(element("b", {}, title), element("table", {}, ...body));
  }

  placeTip(x, y) {
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const room = this.host.clientWidth - width;
    const left = x + 16 + width > this.host.clientWidth ? x - width - 16 : x + 16;
    const top = this.canvas.offsetTop + y - height / 3;
    this.tip.style.left = `${Math.max(0, Math.min(left, room))}px`;
    this.tip.style.top = `${Math.max(0, top)}px`;
  }

  // ---- drawing ---------------------------------------------------------------------------------

  redraw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = null;
      if (this.host.clientWidth) this.paint(); // a run that is not shown has no width
    });
  }

  paint() {
    const ratio = devicePixelRatio || 1;
    const [width, height] = [this.host.clientWidth, this.height()];
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colours = Object.fromEntries(
      ["paper", "ink", "quiet", "line", "grid", "mark", "accent"].map((each) => [each, colour(each)]),
    );
    this.font = (size, weight = 400) => `${weight} ${size}px system-ui, "Noto Sans", sans-serif`;
    this.drawTimes(context, height);
    context.save();
    this.draw(context, height - AXIS);
    context.restore();
    this.drawPointer(context, height - AXIS);
    const { begin, end } = this.window;
    const words = this.window.isWhole ? "the whole step, " : `from ${formatSeconds(begin)}, `;
    this.range.textContent = `${words}${formatSeconds(end - begin)}`;
  }

  /** Keep what is drawn from now on inside the chart. */
  clip(context, bottom) {
    context.beginPath();
    context.rect(this.left, 0, this.width, bottom);
    context.clip();
  }

  drawTimes(context, height) {
    const { begin, end } = this.window;
    const marks = unitTicks(begin, end, this.width / 95, TIMES, Math.max(end, -begin));
    context.font = this.font(11);
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const { at, text } of marks) {
      const x = Math.round(this.x(at)) + 0.5;
      context.fillStyle = this.colours.grid;
      context.fillRect(x - 0.5, 0, 1, height - AXIS);
      context.fillStyle = this.colours.quiet;
      const half = context.measureText(text).width / 2;
      const most = this.left + this.width - half + 6;
      context.fillText(text, Math.min(Math.max(x, half + 1), most), height - AXIS / 2);
    }
  }

  drawPointer(context, bottom) {
    const { cursor } = this.window;
    if (cursor !== null) {
      context.fillStyle = this.colours.quiet;
      context.fillRect(Math.round(this.x(cursor)), 0, 1, bottom);
    }
    if (this.drag) {
      const { from, to } = this.drag;
      context.globalAlpha = 0.2;
      context.fillStyle = this.colours.accent;
      context.fillRect(Math.min(from, to), 0, Math.abs(to - from), bottom);
      context.globalAlpha = 1;
    }
  }

  /** What to fill an area with: a colour, or a colour with white hatching. */
  filling(context, { colour, hatched }) {
    if (!hatched) return colour;
    const tile = new OffscreenCanvas(8, 8);
    const pen = tile.getContext("2d");
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = "#ffffff99";
    pen.lineWidth = 1.4;
    pen.beginPath();
    for (const shift of [-8, 0, 8]) {
      pen.moveTo(shift - 1, 9);
      pen.lineTo(shift + 9, -1);
    }
    pen.stroke();
    return context.createPattern(tile, "repeat");
  }

  /** Text that is legible on whatever it is drawn over. */
  drawOutlined(context, text, x, y) {
    context.lineWidth = 4;
    context.lineJoin = "round";
    context.strokeStyle = this.colours.paper;
    context.strokeText(text, x, y);
    context.fillStyle = this.colours.ink;
    context.fillText(text, x, y);
  }
}
