// The server's API, as any client calls it. The key is held here, in memory, and nowhere else.

export class ApiError extends Error {
  /** status: of the response; 0: there was none, or the stream ended early. */
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  #key = "";

  get hasKey() {
    return this.#key !== "";
  }

  useKey(key) {
    this.#key = key;
  }

  /** The served model, as GET /v1/models describes it. */
  async model() {
    const response = await this.#send("v1/models", {});
    return (await response.json()).data[0];
  }

  /** Events of a streamed answer: of chat, or of a completion if the body has a prompt. Throws ApiError; an AbortError
   * if the signal ends it. */
  async *answer(body, signal) {
    const headers = { "Content-Type": "application/json" };
    const options = { method: "POST", headers, body: JSON.stringify({ ...body, stream: true }), signal };
    const path = "prompt" in body ? "v1/completions" : "v1/chat/completions";
    const response = await this.#send(path, options);
    for await (const data of serverSentData(response.body, signal)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(0, event.error.message, event.error.code ?? event.error.type);
      yield event;
    }
    throw new ApiError(0, "the connection ended before the answer did", "connection_lost");
  }

  async #send(path, options) {
    const headers = { ...options.headers };
    if (this.#key) headers.Authorization = `Bearer ${this.#key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "no connection", "unreachable");
    }
    if (response.ok) return response;
    const { error } = await response.json().catch(() => ({}));
    throw new ApiError(response.status, error?.message ?? response.statusText, error?.code ?? null);
  }
}

async function* serverSentData(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      throw new ApiError(0, "the connection ended before the answer did", "connection_lost");
    }
    if (part.done) return;
    const events = (waiting + part.value).split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: "));
      if (data.length) yield data.map((line) => line.slice(6)).join("\n");
    }
  }
}
