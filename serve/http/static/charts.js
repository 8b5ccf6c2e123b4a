// Small line charts. A chart is a figure: its title and current value are text, the line is decoration of them.

import { element, number, svg } from "./elements.js";

const [WIDTH, HEIGHT, TOP] = [280, 64, 4];
const MOST_POINTS = 2 * WIDTH; // of a line: more would be work for each frame that nobody sees

export class Chart {
  #value;
  #note;
  #lines = {};
  #digits;
  #last = { main: [], other: [] };

  /** digits: of the value; xName: what the horizontal axis counts. */
  constructor(parent, { title, unit, digits, xName, explanation }) {
    this.#digits = digits;
    this.#value = element("span", { class: "value" }, "–");
    this.#note = element("span", { class: "quiet" });
    for (const name of ["other", "main"]) this.#lines[name] = svg("path", { class: `line ${name}` });
    const drawing = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("path", { class: "base", d: `M0 ${HEIGHT - 1}H${WIDTH}` }),
      ...Object.values(this.#lines),
    );
    const heading = element("figcaption", {}, element("span", { class: "title" }, title), " ", this.#value, ` ${unit}`);
    const axis = element("p", { class: "axis quiet" }, this.#note, element("span", {}, `${xName} →`));
    parent.append(element("figure", { title: explanation }, heading, drawing, axis));
  }

  /** points: [x, y]. `which`: "main", or "other" for the answer without the draft. */
  draw(which, points, value = null) {
    this.#last[which] = thinned(points);
    if (which === "main" && value !== null) this.#value.textContent = number(value, this.#digits);
    const all = Object.values(this.#last).flat();
    const most = Math.max(1e-9, ...all.map(([, y]) => y));
    const [first, last] = [Math.min(...all.map(([x]) => x)), Math.max(...all.map(([x]) => x))];
    const place = ([x, y]) => {
      const across = last > first ? (WIDTH * (x - first)) / (last - first) : 0;
      return `${across.toFixed(1)} ${(HEIGHT - 1 - ((HEIGHT - 1 - TOP) * y) / most).toFixed(1)}`;
    };
    for (const [name, line] of Object.entries(this.#lines)) {
      line.setAttribute("d", this.#last[name].length ? `M${this.#last[name].map(place).join("L")}` : "");
    }
    this.#note.textContent = all.length ? `0 to ${number(most, most < 10 ? this.#digits : 0)}` : "";
  }

  clear() {
    this.#value.textContent = "–";
    this.draw("other", []);
    this.draw("main", []);
  }
}

/** At most MOST_POINTS of them, at equal distances, and the last. */
function thinned(points) {
  const apart = Math.ceil(points.length / MOST_POINTS);
  return points.filter((_, index) => index % apart === 0 || index === points.length - 1);
}

/** The three charts of an answer; `update` takes a Progress of tokens.js. */
export class Charts {
  constructor(parent) {
    const make = (options) => new Chart(parent, options);
    this.length = make({
      title: "Accept length", unit: "tokens/pass", digits: 2, xName: "passes",
      explanation: "How many tokens a pass of the model gave on average. Without a draft it is 1.",
    });
    this.speed = make({
      title: "Speed", unit: "tokens/s", digits: 0, xName: "seconds",
      explanation: "Tokens that arrived here in the last second; at the end, of the whole answer.",
    });
    this.rows = make({
      title: "Rows", unit: "per pass", digits: 1, xName: "passes",
      explanation: "Tokens that a pass computed at once: guesses to check, and those of other requests.",
    });
    this.key = element("p", { class: "quiet", hidden: "" }, "Dashed: without the draft.");
    parent.append(this.key);
  }

  clear() {
    for (const chart of [this.length, this.speed, this.rows]) chart.clear();
    this.key.hidden = true;
  }

  update(which, progress, isOver = false) {
    const rounds = [...progress.rounds.values()];
    let total = 0;
    const lengths = rounds.map(({ tokens }, index) => [index + 1, (total += tokens) / (index + 1)]);
    this.length.draw(which, lengths, progress.acceptLength);
    const speed = isOver ? progress.speed : (progress.speeds.at(-1)?.[1] ?? null);
    this.speed.draw(which, progress.speeds, speed);
    const rows = rounds.map((round, index) => [index + 1, round.rows]);
    const mean = rows.length ? rows.reduce((sum, [, y]) => sum + y, 0) / rows.length : null;
    this.rows.draw(which, rows, mean);
    if (which === "other") this.key.hidden = false;
  }
}
