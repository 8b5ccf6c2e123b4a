// The playground: a chat whose tokens show where they come from.

import { Answer, ordinal, watchDetails } from "./answer.js";
import { Api, ApiError } from "./api.js";
import { Charts } from "./charts.js";
import { byId, element, number } from "./elements.js";
import { ALTERNATIVES, differences } from "./tokens.js";

const MOST_KEYS = 4; // positions in the legend
const SEEDS = 2 ** 32;
const AT_END = 40; // pixels from the end of the page within which it is in sight
const EXAMPLE = "Tom has 3 boxes of 12 eggs. How many eggs does he have?";

const api = new Api();
const charts = new Charts(byId("charts"));
let messages = []; // the conversation so far
let running = null; // an AbortController while an answer comes
let retry = null; // what the alert's button does
let afterKey = null; // what to do once there is a key
let follows = true; // the end of the page stays in sight while it grows
let lastScroll = 0;
let failedTurn = null; // whose question is back in the message field

async function connect(then = null) {
  try {
    const model = await api.model();
    byId("key-dialog").close();
    const drafts = model.num_spec_tokens;
    const told = drafts ? `up to ${drafts} guesses per pass` : "no draft: only text that a format fixes is guessed";
    byId("model").textContent = `${model.id} · ${told}`;
    const guesser = model.draft_fingerprint === "ngram" ? "ngram" : "draft"; // n-grams have no checkpoint, and so a name
    byId("guesser").textContent = guesser === "ngram" ? "from text that repeats itself" : "by a small draft model";
    showKeys(guesser === "ngram" ? 0 : drafts);
    byId("compare-label").hidden = drafts === 0;
    const [longest, most] = [byId("max-tokens"), Math.ceil(model.max_model_len / 2)];
    if (longest.value > most) longest.value = most;
  } catch (error) {
    if (error.status === 401) askForKey(error, () => connect(then));
    else showProblem(error, () => connect(then));
    return;
  }
  then?.();
}

function showKeys(drafts) {
  const sample = (kind, step, text, more = "") => {
    const shown = element("span", { class: `token ${kind} ${more}` }, text);
    shown.style.setProperty("--step", step);
    return element("li", {}, shown);
  };
  const steps = Array.from({ length: Math.min(drafts, MOST_KEYS) }, (_, index) => index + 1);
  byId("keys").replaceChildren(
    sample("target", 0, "the model itself"),
    ...steps.map((step) => {
      const isLast = step === MOST_KEYS && drafts > MOST_KEYS;
      return sample("draft", step, `${step === 1 ? "draft’s " : ""}${ordinal(step)}${step === 1 ? " guess" : isLast ? " or later" : ""}`);
    }),
    sample("ngram", 2, "n-grams (repeats)"),
    sample("grammar", 2, "fixed by format"),
    sample("target", 0, "guess refused here", "refused"),
  );
}

// What is asked

function readSettings() {
  const value = (id) => byId(id).value.trim();
  const settings = {};
  if (value("max-tokens")) settings.max_tokens = Number(value("max-tokens"));
  if (value("temperature")) settings.temperature = Number(value("temperature"));
  settings.seed = value("seed") ? Number(value("seed")) : Math.floor(Math.random() * SEEDS);
  if (value("schema")) {
    const schema = JSON.parse(value("schema"));
    settings.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return settings;
}

/** The settings, or null where one cannot be sent: it is then shown with what is wrong. */
function checkedSettings() {
  byId("settings-problem").textContent = "";
  for (const field of byId("settings").querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  for (const field of byId("settings").querySelectorAll("input")) {
    if (!field.checkValidity()) return refuseSetting(field, `${field.labels[0].textContent.trim()}: ${field.validationMessage}`);
  }
  try {
    return readSettings();
  } catch (error) {
    return refuseSetting(byId("schema"), `This is not JSON (${error.message}). Correct it, or leave the field empty.`);
  }
}

function refuseSetting(field, problem) {
  byId("settings-problem").textContent = problem;
  field.setAttribute("aria-invalid", "true");
  byId("settings").open = true;
  field.focus();
  return null;
}

function bodyOf(question, settings, enabled) {
  const asked = { ...settings, speculation: { enabled, trace: true } };
  if (byId("continues").checked) return { prompt: question, logprobs: ALTERNATIVES, ...asked };
  const system = byId("system").value.trim();
  const before = system ? [{ role: "system", content: system }] : [];
  const all = [...before, ...messages, { role: "user", content: question }];
  return { messages: all, logprobs: true, top_logprobs: ALTERNATIVES, ...asked };
}

async function send(question) {
  const settings = checkedSettings();
  if (settings === null || running) return;
  byId("message").value = "";
  clearProblem();
  failedTurn?.remove();
  failedTurn = null;
  const [compares, continues, conversation] = [byId("compare").checked, byId("continues").checked, messages];
  const edit = element("button", { type: "button", class: "small" }, "Edit");
  const turn = element("article", { class: "turn" },
    element("div", { class: "row heading" }, element("h3", {}, continues ? "Text" : "You"), edit),
    element("p", { class: "question" }, question));
  const numMessages = messages.length;
  edit.addEventListener("click", () => takeBack(turn, numMessages, question));
  const answers = element("div", { class: "answers" });
  turn.append(answers);
  byId("turns").append(turn);
  turn.scrollIntoView({ block: "start" });
  follows = true;
  charts.clear();
  setRunning(new AbortController());
  say("The model is answering.");
  try {
    const drafted = await answered(answers, compares ? "With the draft" : "Answer", "main", bodyOf(question, settings, true));
    let verdict = drafted.told();
    if (compares && !running.signal.aborted) {
      const plain = await answered(answers, "Without the draft", "other", bodyOf(question, settings, false));
      if (!running.signal.aborted) verdict = compared(turn, drafted, plain);
    }
    if (!continues) conversation.push({ role: "user", content: question }, drafted.message);
    say(`Done. ${verdict}`);
  } catch (error) {
    failed(error, turn, question);
  } finally {
    setRunning(null);
  }
}

/** Streams one answer onto the page. Ends quietly where the user stops it; throws ApiError. */
async function answered(parent, title, which, body) {
  const answer = new Answer(parent, title);
  const arrived = []; // choices, with their times, that are not on the page yet: what comes within a frame is shown at once
  let how = "";
  const draw = () => {
    if (!arrived.length) return;
    arrived.splice(0).forEach(([choice, time]) => answer.add(choice, time));
    if (answer.node.isConnected) charts.update(which, answer.progress);
  };
  try {
    for await (const event of api.answer(body, running.signal)) {
      for (const choice of event.choices) {
        if (arrived.push([choice, performance.now()]) === 1) requestAnimationFrame(draw);
        if (choice.finish_reason === "length") how = "cut at the longest answer allowed";
      }
    }
  } catch (error) {
    if (!running.signal.aborted) {
      draw();
      answer.end("it ends here, since it failed");
      throw error;
    }
    how = "stopped";
  }
  draw();
  answer.end(how);
  if (answer.node.isConnected) charts.update(which, answer.progress, true);
  return answer;
}

/** Keeps the end of the page in sight while it grows, until the user scrolls up. */
function followEnd() {
  const page = document.documentElement;
  const isAtEnd = () => window.innerHeight + window.scrollY > page.scrollHeight - AT_END;
  window.addEventListener("scroll", () => {
    follows = isAtEnd() || (follows && window.scrollY >= lastScroll);
    lastScroll = window.scrollY;
  }, { passive: true });
  new ResizeObserver(() => {
    if (follows) window.scrollTo({ top: page.scrollHeight });
  }).observe(document.body);
}

/** Puts a question back into the message field; it and what came after it leave the conversation. */
function takeBack(turn, numMessages, question) {
  running?.abort();
  messages = messages.slice(0, numMessages);
  while (turn.nextElementSibling) turn.nextElementSibling.remove();
  turn.remove();
  byId("message").value = question;
  byId("message").focus();
}

function compared(turn, drafted, plain) {
  const [here, there] = differences(drafted.progress.tokens, plain.progress.tokens);
  drafted.mark(here);
  plain.mark(there);
  const count = Math.max(here.size, there.size);
  const same = count
    ? `${count} ${count === 1 ? "token differs" : "tokens differ"}, marked by a frame.`
    : `The same ${drafted.progress.tokens.length} tokens.`;
  const [fast, slow] = [drafted.progress.speed, plain.progress.speed];
  const pace = fast && slow
    ? ` With the draft ${number(fast / slow, 2)} times the speed: ${number(fast)} and ${number(slow)} tokens/s.`
    : "";
  const why = count ? " Two tokens that are almost equally likely can change places on some hardware; " : "";
  const link = count ? element("a", { href: "playground/help.html#differences" }, "when that happens") : null;
  const verdict = element("p", { class: `verdict ${count ? "unequal" : "equal"}` }, same, pace, why, link);
  turn.append(verdict);
  return same + pace;
}

// What goes wrong

/** What happened, and what to do about it. */
function explained(error) {
  if (!(error instanceof ApiError)) return ["The page itself failed.", `${error}. Reload it.`];
  const said = `It says: ${error.message.replace(/\.?$/, ".")}`;
  switch (error.code) {
    case "unreachable":
      return ["The server cannot be reached.", "See whether it still runs (its log says why it ended), start it again, and try again."];
    case "connection_lost":
      return ["The connection broke off during the answer.", "See whether the server still runs, and try again."];
    case "context_length_exceeded":
      return ["The conversation is too long for the model.", `${said} Begin a new chat, or ask for a shorter answer.`];
    case "no_chat_template":
      byId("settings").open = true;
      return ["This model is not made for chat.", "Tick “Continue the text” in the settings, and try again."];
    case "engine_failed":
      if (error.status === 503) break; // it failed before the request came
      return ["The engine failed during the answer.", `${said} Start the server again if it has ended, and try again.`];
    case "server_shutting_down":
      return ["The server is shutting down.", "It takes no more requests. Start it again, and try again."];
    case "server_overloaded":
      return ["The server is full.", `${said} Wait a moment, and try again.`];
  }
  if (error.status === 429) return ["The server is full.", `${said} Wait a moment, and try again.`];
  if (error.status >= 500) return ["The server cannot answer now.", `${said} Look into its log, start it again if it has ended, and try again.`];
  return ["The server refused the request.", `${said} Change the message or the settings, and send it again.`];
}

function failed(error, turn, question) {
  const again = () => {
    turn.remove();
    send(question);
  };
  if (error.status === 401) {
    turn.remove();
    askForKey(error, () => connect(() => send(question)));
  } else {
    if (!byId("message").value) byId("message").value = question;
    failedTurn = turn;
    showProblem(error, again);
  }
}

function showProblem(error, again) {
  const [what, remedy] = explained(error);
  const button = element("button", { type: "button", id: "retry" }, "Try again");
  retry = again;
  button.addEventListener("click", () => {
    clearProblem();
    byId("message").value = "";
    retry();
  });
  const told = element("p", {}, element("strong", {}, what), ` ${remedy}`);
  byId("alert").replaceChildren(told, button);
  say("");
}

function clearProblem() {
  byId("alert").replaceChildren();
}

function askForKey(error, then) {
  byId("key-problem").textContent = api.hasKey ? `${error.message}. Check it, and type it again.` : "";
  byId("key").value = "";
  api.useKey("");
  afterKey = then;
  byId("model").textContent = "needs an API key";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key").focus();
}

// The page's controls

function setRunning(controller) {
  running = controller;
  const [shown, hidden] = controller ? [byId("stop"), byId("send")] : [byId("send"), byId("stop")];
  const hadFocus = document.activeElement === hidden;
  shown.hidden = false;
  hidden.hidden = true;
  if (hadFocus) shown.focus();
}

function say(text) {
  byId("status").textContent = text;
}

function submitMessage() {
  const question = byId("message").value.trim();
  if (question && !running) send(question);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submitMessage();
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submitMessage();
});
byId("stop").addEventListener("click", () => {
  running?.abort();
  byId("message").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && byId("details").hidden && !byId("key-dialog").open) running?.abort();
}, { capture: true }); // before the details are closed by it
byId("example").addEventListener("click", () => {
  byId("message").value = EXAMPLE;
  byId("message").focus();
});
byId("new-chat").addEventListener("click", () => {
  running?.abort();
  messages = [];
  byId("turns").replaceChildren();
  failedTurn = null;
  clearProblem();
  charts.clear();
  byId("message").focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  api.useKey(key);
  afterKey();
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-dialog").addEventListener("close", () => {
  byId("key").value = "";
});
watchDetails();
followEnd();
showKeys(3);
connect();
