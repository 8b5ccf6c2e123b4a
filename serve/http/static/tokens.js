// From events of a streamed answer to tokens, each with its text, its trace and its log-probabilities.

export const ALTERNATIVES = 5; // likeliest tokens told of beside each token

/**
 * Reads one choice. Invariant: the texts of all tokens join to the text that the server sent, reasoning before content.
 *
 * A token's bytes say what it spells; which part of the text that is has to be found, since the server leaves out
 * special tokens and markers, and a character may be spelled by several tokens.
 */
export class TokenReader {
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  #text = []; // {kind, text}: received, and not yet a token's
  #scored = []; // entries of logprobs.content that wait for their trace, and the other way round
  #traced = [];
  #last = null;

  /** New tokens of an event: {kind, text, id, token, source, position, round, refused, drafted, rows, logprob, top}. */
  read(choice) {
    const delta = choice.delta ?? { content: choice.text };
    if (delta.reasoning_content) this.#text.push({ kind: "reasoning", text: delta.reasoning_content });
    if (delta.content) this.#text.push({ kind: "content", text: delta.content });
    this.#scored.push(...(choice.logprobs?.content ?? entriesOf(choice.logprobs)));
    this.#traced.push(...(choice.speculation?.trace ?? []));
    const found = [];
    while (this.#scored.length && this.#traced.length) {
      found.push(this.#joined(this.#traced.shift(), this.#scored.shift()));
    }
    if (found.length) this.#giveRest(found.at(-1));
    return found;
  }

  #joined(trace, scored) {
    const spelled = this.#decoder.decode(new Uint8Array(scored.bytes ?? []), { stream: true });
    const top = scored.top_logprobs.map(({ token, logprob }) => ({ token, logprob }));
    this.#last = { ...trace, ...this.#taken(spelled), logprob: scored.logprob, top };
    return this.#last;
  }

  /** The part of the received text that a token spells; empty if it is not shown. */
  #taken(spelled) {
    const next = this.#text[0];
    if (!next) return { kind: this.#last?.kind ?? "content", text: "" };
    for (const text of [spelled, spelled.trimStart()]) {
      if (text && next.text.startsWith(text)) return this.#cut(text.length);
    }
    // The token goes beyond this part: the rest of its text was left out, or is in the next part.
    const isBeyond = spelled.startsWith(next.text) && next.text.trim();
    return isBeyond ? this.#cut(next.text.length) : { kind: next.kind, text: "" };
  }

  #cut(length) {
    const { kind, text } = this.#text[0];
    if (length === text.length) this.#text.shift();
    else this.#text[0] = { kind, text: text.slice(length) };
    return { kind, text: text.slice(0, length) };
  }

  /** An event brings all tokens of its text, so what was not found belongs to the last one. */
  #giveRest(token) {
    for (const { kind, text } of this.#text.splice(0)) {
      if (!token.text) token.kind = kind;
      token.text += text;
    }
  }
}

/** The log-probabilities of a completion as chat has them; the likeliest tokens come with the token itself. */
function entriesOf(logprobs) {
  return (logprobs?.tokens ?? []).map((token, index) => {
    const top = Object.entries(logprobs.top_logprobs[index]).map(([other, logprob]) => ({ token: other, logprob }));
    top.sort((one, other) => other.logprob - one.logprob);
    return { bytes: bytesOf(token), logprob: logprobs.token_logprobs[index], top_logprobs: top.slice(0, ALTERNATIVES) };
  });
}

/** What a token's name spells: it is its text, or "bytes:\xe4\xbd" for a part of a character. */
function bytesOf(name) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(name)) return new TextEncoder().encode(name);
  return name.match(/[0-9a-f]{2}(?=\\|$)/g).map((digits) => Number.parseInt(digits, 16));
}

/** Who proposed a token: "target", "draft", "ngram" or "grammar". */
export function origin(token) {
  return ["target", "ngram", "grammar"].includes(token.source) ? token.source : "draft";
}

const LEAST_SPAN = 250; // milliseconds: a shorter answer comes in bursts, which tell no speed

/** Counts and times of one answer, while it comes. Times are milliseconds of performance.now(). */
export class Progress {
  tokens = [];
  rounds = new Map(); // number -> {tokens, drafted, rows}
  speeds = []; // [seconds since the first token, tokens per second of late]
  #arrivals = []; // [time, how many tokens by then]

  add(tokens, time) {
    this.tokens.push(...tokens);
    for (const { round, drafted, rows } of tokens.filter((token) => token.round > 0)) {
      const seen = this.rounds.get(round) ?? { tokens: 0, drafted, rows };
      this.rounds.set(round, { ...seen, tokens: seen.tokens + 1 });
    }
    if (!tokens.length) return;
    this.#arrivals.push([time, this.tokens.length]);
    const [first] = this.#arrivals[0];
    const [start, before] = this.#arrivals.findLast(([when]) => when <= time - 1000) ?? this.#arrivals[0];
    if (time - start > LEAST_SPAN) {
      this.speeds.push([(time - first) / 1000, (1000 * (this.tokens.length - before)) / (time - start)]);
    }
  }

  /** Tokens per second after the first ones, which came with the prompt; null if that is not known. */
  get speed() {
    if (this.#arrivals.length < 2) return null;
    const [[first, before], [last, total]] = [this.#arrivals[0], this.#arrivals.at(-1)];
    return last - first > LEAST_SPAN ? (1000 * (total - before)) / (last - first) : null;
  }

  get seconds() {
    return this.#arrivals.length ? (this.#arrivals.at(-1)[0] - this.#arrivals[0][0]) / 1000 : 0;
  }

  /** Tokens that a pass of the model gave on average; null before the first round. */
  get acceptLength() {
    return this.rounds.size ? sum([...this.rounds.values()].map((round) => round.tokens)) / this.rounds.size : null;
  }

  get drafted() {
    return sum([...this.rounds.values()].map((round) => round.drafted));
  }

  get accepted() {
    return this.tokens.filter((token) => token.position > 0).length;
  }
}

function sum(numbers) {
  return numbers.reduce((total, one) => total + one, 0);
}

const MOST_CELLS = 4e6; // of the table below; beyond that all that lies between is called different

/** Places at which two lists of tokens differ: sets of indexes in each, by their longest common subsequence. */
export function differences(one, other) {
  const [a, b] = [one, other].map((tokens) => tokens.map((token) => token.id));
  let start = 0;
  while (start < Math.min(a.length, b.length) && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < Math.min(a.length, b.length) - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const [left, right] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  const [keptLeft, keptRight] = left.length * right.length > MOST_CELLS ? [[], []] : commonPlaces(left, right);
  const others = (list, kept) => {
    const same = new Set(kept);
    return new Set([...list.keys()].filter((index) => !same.has(index)).map((index) => index + start));
  };
  return [others(left, keptLeft), others(right, keptRight)];
}

function commonPlaces(a, b) {
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width); // of common subsequences of a[i:] and b[j:]
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      const down = lengths[(i + 1) * width + j];
      const right = lengths[i * width + j + 1];
      lengths[i * width + j] = a[i] === b[j] ? lengths[(i + 1) * width + j + 1] + 1 : Math.max(down, right);
    }
  }
  const places = [[], []];
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) {
      places[0].push(i++);
      places[1].push(j++);
    } else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return places;
}
