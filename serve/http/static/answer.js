// One answer on the page: its tokens, a slider that walks over them, and what is told of each.

import { byId, element, number, percent, visible } from "./elements.js";
import { Progress, TokenReader, origin } from "./tokens.js";

const MOST_STEPS = 8; // positions with a tint of their own
let lastId = 0;

/** A token as a sentence, for the slider and for screen readers. */
export function described(token) {
  const chance = token.logprob > -9999 ? `, probability ${percent(Math.exp(token.logprob))}` : "";
  const refused = token.refused.length ? `, refused here: ${token.refused.map(nameOfGuess).join(", ")}` : "";
  const round = token.round ? `, round ${token.round}` : "";
  return `${visible(token.text)}: ${nameOfOrigin(token)}${round}${chance}${refused}`;
}

/** A refused guess; the server withholds those from other requests' texts. */
function nameOfGuess(guess) {
  return guess.token === null ? "(withheld)" : visible(guess.token);
}

function nameOfOrigin(token) {
  switch (origin(token)) {
    case "target":
      return "the model itself";
    case "ngram":
      return `guessed from repeated text, ${ordinal(token.position)} in a row`;
    case "grammar":
      return `fixed by the format, ${ordinal(token.position)} in a row`;
    default:
      return `guessed by the draft (${token.source}), ${ordinal(token.position)} in a row`;
  }
}

export function ordinal(count) {
  const ending = count % 100 > 10 && count % 100 < 14 ? "th" : (["th", "st", "nd", "rd"][count % 10] ?? "th");
  return `${count}${ending}`;
}

export class Answer {
  progress = new Progress();
  #reader = new TokenReader();
  #shown = []; // {token, span}
  #byRound = new Map(); // round -> spans
  #picked = -1;

  constructor(parent, title) {
    const id = `answer-${(lastId += 1)}`;
    this.reasoning = element("div", { class: "tokens" });
    this.thinking = element("details", { class: "reasoning", open: "", hidden: "" },
      element("summary", {}, "Reasoning"), this.reasoning);
    this.content = element("div", { class: "tokens" });
    this.slider = element("input", {
      type: "range", id, min: 1, max: 1, value: 1, "aria-valuetext": "none yet", autocomplete: "off",
    });
    this.walk = element("div", { class: "walk", hidden: "" }, element("label", { for: id }, "Inspect token"), this.slider);
    this.summary = element("p", { class: "summary quiet" });
    this.copy = element("button", { type: "button", class: "small", hidden: "" }, "Copy");
    this.copy.addEventListener("click", () => this.#copyText());
    this.node = element("section", { class: "answer", "aria-label": title, "aria-busy": "true" },
      element("div", { class: "row heading" }, element("h4", {}, title), this.copy),
      this.thinking, this.content, this.walk, this.summary);
    parent.append(this.node);
    for (const type of ["input", "focus"]) {
      this.slider.addEventListener(type, () => this.pick(this.slider.valueAsNumber - 1, this.walk));
    }
    this.slider.addEventListener("blur", () => this.unpick());
    // Not "pointerover", which comes also where new text moves a token under a pointer at rest.
    for (const type of ["pointermove", "click"]) this.node.addEventListener(type, (event) => this.#hover(event));
    this.node.addEventListener("pointerleave", (event) => {
      if (!byId("details").contains(event.relatedTarget)) this.unpick();
    });
  }

  /** A choice of an event of the stream. */
  add(choice, time) {
    const tokens = this.#reader.read(choice);
    this.progress.add(tokens, time);
    for (const token of tokens) this.#show(token);
    if (!this.#shown.length) return;
    this.walk.hidden = false;
    this.slider.max = this.#shown.length;
    if (this.#picked < 0) this.slider.setAttribute("aria-valuetext", this.#valueText(0));
  }

  /** The whole answer, as a message of the conversation. */
  get message() {
    const text = (kind) => this.progress.tokens.filter((one) => one.kind === kind).map((one) => one.text).join("");
    const reasoning = text("reasoning");
    return { role: "assistant", content: text("content"), ...(reasoning ? { reasoning_content: reasoning } : {}) };
  }

  /** how: why it ended, if that needs saying. */
  end(how = "") {
    this.node.setAttribute("aria-busy", "false");
    this.copy.hidden = !navigator.clipboard; // only over https and on this machine
    this.summary.textContent = [this.told(), how].filter(Boolean).join(" · ");
    if (!this.progress.tokens.some((token) => token.text)) this.content.append(element("p", { class: "quiet" }, "(no text)"));
  }

  async #copyText() {
    await navigator.clipboard.writeText(this.message.content);
    this.copy.textContent = "Copied";
    setTimeout(() => (this.copy.textContent = "Copy"), 2000);
  }

  told() {
    const { tokens, speed, acceptLength, drafted, accepted } = this.progress;
    const told = [`${tokens.length} ${tokens.length === 1 ? "token" : "tokens"}`];
    if (speed !== null) told.push(`${number(speed)} tokens/s`);
    if (acceptLength !== null && drafted) told.push(`accept length ${number(acceptLength, 2)}`);
    if (drafted) told.push(`${accepted} of ${drafted} guesses kept`);
    return told.join(" · ");
  }

  /** Marks the tokens at these places. */
  mark(places) {
    const marked = new Set([...places].map((place) => this.progress.tokens[place]));
    for (const { token, span } of this.#shown) span.classList.toggle("differs", marked.has(token));
  }

  #show(token) {
    if (token.text === "") return;
    const kind = origin(token);
    const span = element("span", { class: `token ${kind}` }, token.text);
    span.style.setProperty("--step", Math.min(token.position, MOST_STEPS));
    if (token.refused.length) span.classList.add("refused");
    span.dataset.place = this.#shown.length;
    const isThought = token.kind === "reasoning";
    if (isThought) this.thinking.hidden = false;
    (isThought ? this.reasoning : this.content).append(span);
    this.#shown.push({ token, span });
    this.#byRound.set(token.round, [...(this.#byRound.get(token.round) ?? []), span]);
  }

  #hover(event) {
    const span = event.target.closest(".token");
    if (span && Number(span.dataset.place) !== this.#picked) this.pick(Number(span.dataset.place));
  }

  /** Shows the details of the token at a place, beside it or beside another element. */
  pick(place, beside = null) {
    this.unpick();
    const { token, span } = this.#shown[place];
    this.#picked = place;
    this.slider.value = place + 1;
    this.slider.setAttribute("aria-valuetext", this.#valueText(place));
    for (const other of this.#byRound.get(token.round)) other.classList.add("same-round");
    span.classList.add("picked");
    showDetails(token, beside ?? span, this);
  }

  unpick() {
    if (this.#picked < 0) return;
    const { token, span } = this.#shown[this.#picked];
    for (const other of this.#byRound.get(token.round)) other.classList.remove("same-round");
    span.classList.remove("picked");
    this.#picked = -1;
    hideDetails();
  }

  #valueText(place) {
    return `${place + 1} of ${this.#shown.length}, ${described(this.#shown[place].token)}`;
  }
}

let shownFor = null;

function showDetails(token, beside, answer) {
  const box = byId("details");
  shownFor = answer;
  box.replaceChildren(...detailsOf(token));
  box.hidden = false;
  const line = [...beside.getClientRects()].reduce((one, other) => (other.width > one.width ? other : one));
  const [width, height] = [box.offsetWidth, box.offsetHeight];
  const left = Math.min(Math.max(8, line.left), document.documentElement.clientWidth - width - 8);
  const lowest = window.innerHeight - height - 8;
  const above = line.top - height - 4;
  const top = line.bottom + 4 <= lowest ? line.bottom + 4 : above >= 8 ? above : Math.max(8, lowest);
  box.style.left = `${left + window.scrollX}px`;
  box.style.top = `${top + window.scrollY}px`;
}

function hideDetails() {
  byId("details").hidden = true;
  shownFor = null;
}

/** The pointer may move onto the details; Escape, leaving them, and a click or tap elsewhere close them. */
export function watchDetails() {
  document.addEventListener("click", (event) => {
    if (!event.target.closest(".token, .walk, #details")) shownFor?.unpick();
  });
  byId("details").addEventListener("pointerleave", () => shownFor?.unpick());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") shownFor?.unpick();
  });
}

function detailsOf(token) {
  const facts = [["From", nameOfOrigin(token)]];
  if (token.round) {
    const others = token.rows - token.drafted - 1;
    const rows = `${token.rows} ${token.rows === 1 ? "row" : "rows"}${others > 0 ? `, ${others} of them for others` : ""}`;
    const guesses = `${token.drafted} guessed ${token.drafted === 1 ? "token" : "tokens"}`;
    facts.push(["Round", `${token.round}: ${guesses} checked, in a pass of ${rows}`]);
  } else facts.push(["Round", "none: it came with the prompt"]);
  if (token.refused.length) facts.push(["Refused here", token.refused.map(nameOfGuess).join("  ")]);
  facts.push(["Probability", token.logprob > -9999 ? percent(Math.exp(token.logprob)) : "none, by the server’s settings"]);
  const rows = token.top.map((one) => {
    const bar = element("span", { class: "bar" });
    bar.style.setProperty("--share", Math.exp(one.logprob));
    return element("tr", { class: one.token === token.token ? "chosen" : null },
      element("td", {}, element("code", {}, visible(one.token))),
      element("td", { class: "bars" }, bar),
      element("td", { class: "share" }, percent(Math.exp(one.logprob))));
  });
  return [
    element("p", { class: "name" }, element("code", {}, visible(token.text)), " ", element("span", { class: "quiet" }, `id ${token.id}`)),
    element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])),
    element("table", {}, element("caption", {}, "The model’s likeliest tokens here"), element("tbody", {}, ...rows)),
  ];
}
