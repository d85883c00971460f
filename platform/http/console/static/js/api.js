// Calls to this server. The key stays in the tab's session storage and goes nowhere else.

const STORED = "outrider.key";

export class ApiError extends Error {
  constructor(message, status = 0, type = "") {
    super(message);
    this.status = status; // 0: no answer at all
    this.type = type;
  }

  /** Whether another key would help. */
  get isAboutKey() {
    return this.status === 401 || this.status === 403;
  }
}

export const getKey = () => sessionStorage.getItem(STORED);
export const setKey = (key) => (key ? sessionStorage.setItem(STORED, key) : sessionStorage.removeItem(STORED));

/** The answer to a call that went well; ApiError otherwise. Paths are relative to the folder the console is in. */
export async function call(path, { method = "GET", body, signal, key = getKey() } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), {
      method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

export const getJson = async (path, options) => (await call(path, options)).json();
export const post = (path, body, options = {}) => call(path, { ...options, method: "POST", body });

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(error.message, response.status, error.type);
  } catch {
    return new ApiError(`The server answered with status ${response.status}`, response.status);
  }
}

/** The objects of a stream of server-sent events, until `[DONE]`; an error inside becomes an ApiError. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let complete = false;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done && complete) return; // the stream is read to its end: leaving it earlier would look like an abort
      if (done) throw new ApiError("The connection broke before the answer was complete");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: ?/, "");
        if (data === "[DONE]") complete = true;
        if (complete) continue;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ApiError(parsed.error.message, 500, parsed.error.type);
        yield parsed;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the answer was complete");
  } finally {
    reader.cancel().catch(() => {});
  }
}
