// The table of the layers: sorts by any column; a layer that is clicked stands out in the lanes.

const COLUMNS = [
  ["index", "layer", String],
  ["microbatch", "microbatch", String],
  ["forward_s", "forward", formatSeconds],
  ["backward_s", "backward", formatSeconds],
  ["wait_s", "waits", formatSeconds],
  ["offloaded_bytes", "offloaded", formatSize],
  ["kept_bytes", "kept", formatSize],
  ["rebuilt_bytes", "rebuilt", formatSize],
  ["recomputed_bytes", "recomputed", formatSize],
];

class LayerTable {
  constructor(host, layers) {
    this.layers = layers;
    // Columns in which there is nothing but zeros are left out.
    this.columns = COLUMNS.filter(([key]) => key === "index" || layers.some((each) => each[key]));
    this.sorted = { key: "index", falling: false };
    this.marked = null;
    this.body = element("tbody");
    this.headings = this.columns.map((column) => this.makeHeading(column));
    const head = element("thead", {}, element("tr", {}, ...this.headings));
    host.append(element("table", {}, head, this.body));
    this.rows = layers.map((layer) => this.makeRow(layer));
    this.sort();
  }

  makeHeading([key, label]) {
    const button = element("button", { type: "button" }, label);
    button.addEventListener("click", () => {
      const { sorted } = this;
      // Figures are wanted largest first, layers in their order.
      const falling = sorted.key === key ? !sorted.falling : key !== "index";
      this.sorted = { key, falling };
      this.sort();
    });
    return element("th", { scope: "col", "data-key": key }, button);
  }

  makeRow(layer) {
    const name = layer.index === null ? "outside layers" : layerName(layer.index, layer.name);
    const button = element("button", { type: "button", "aria-pressed": "false", title: name }, name);
    const row = element("tr", {}, element("th", { scope: "row" }, button));
    button.addEventListener("click", () => this.mark(layer, row));
    for (const [key, , write] of this.columns.slice(1)) {
      const value = layer[key];
      const cell = element("td", {}, value === null ? "–" : value || key === "microbatch" ? write(value) : "–");
      const most = Math.max(...this.layers.map((each) => each[key] ?? 0));
      if (key !== "microbatch" && value) cell.style.setProperty("--share", `${(value / most) * 100}%`);
      row.append(cell);
    }
    return { layer, row, button };
  }

  mark(layer, row) {
    const isMarked = this.marked === row;
    this.marked = isMarked ? null : row;
    for (const each of this.rows) {
      each.row.classList.toggle("marked", each.row === this.marked);
      each.button.setAttribute("aria-pressed", String(each.row === this.marked));
    }
    view.layer = isMarked ? null : layer.index;
    for (const chart of view.charts) chart.plot.redraw(false);
  }

  sort() {
    const { key, falling } = this.sorted;
    const sign = falling ? -1 : 1;
    const value = ({ layer }) => layer[key] ?? (falling ? -Infinity : Infinity);
    this.rows.sort((a, b) => {
      const [first, second] = [value(a), value(b)];
      return first === second ? 0 : sign * (first < second ? -1 : 1);
    });
    this.body.replaceChildren(...this.rows.map(({ row }) => row));
    for (const heading of this.headings) {
      const isKey = heading.dataset.key === key;
      heading.setAttribute("aria-sort", isKey ? (falling ? "descending" : "ascending") : "none");
      const [, label] = this.columns.find(([each]) => each === heading.dataset.key);
      heading.firstChild.textContent = isKey ? `${label} ${falling ? "↓" : "↑"}` : label;
    }
  }
}
