// The playground: a conversation with the model or an adapter, each token coloured by how it came to be.

import { ApiError, events, post } from "./api.js";
import { AnswerStats } from "./answer-stats.js";
import { byId, element, show } from "./dom.js";
import { Turn } from "./turn.js";

export function setUpPlayground(models) {
  const playground = new Playground();
  models.listen((cards) => offerModels(cards));
  byId("prompt-form").onsubmit = (event) => {
    event.preventDefault();
    playground.send();
  };
  byId("stop").onclick = () => playground.stop();
  byId("new-conversation").onclick = () => playground.reset();
  byId("prompt").onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("prompt-form").requestSubmit();
  };
  byId("playground").addEventListener("keydown", (event) => {
    if (event.key === "Escape") playground.stop();
  });
  return playground;
}

function offerModels(cards) {
  const select = byId("model-picker");
  const chosen = select.value;
  const names = cards.map((card) => card.id);
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  select.replaceChildren(
    ...cards.map(({ id, parent }) => element("option", { value: id, textContent: parent === null ? `${id} (base model)` : id })),
  );
  if (names.includes(chosen)) select.value = chosen;
  setBusy(!byId("stop").disabled);
}

function setBusy(busy) {
  byId("send").disabled = busy || byId("model-picker").value === ""; // the models are not known yet, or there are none
  byId("stop").disabled = !busy;
}

class Playground {
  #messages = [];
  #aborter = null; // while an answer comes
  #stats = new AnswerStats(byId("answer-stats"));

  stop() {
    this.#aborter?.abort();
  }

  reset() {
    this.stop();
    this.#messages = [];
    byId("turns").replaceChildren();
    byId("playground-error").textContent = "";
    this.#stats.clear();
    byId("prompt").focus();
  }

  async send() {
    const prompt = byId("prompt");
    const text = prompt.value.trim();
    if (this.#aborter || text === "" || byId("model-picker").value === "") return;
    byId("playground-error").textContent = "";
    const form = formOfAnswer();
    if (form === null) {
      byId("playground-error").textContent = "The schema, or the list of tools, is not JSON.";
      return;
    }
    const conversation = this.#messages; // another one when `reset` came meanwhile
    const messages = [...conversation, { role: "user", content: text }];
    const model = byId("model-picker").value;
    const turn = new Turn(model);
    const log = byId("turns");
    log.append(element("div", { className: "turn user", textContent: text }), turn.root);
    turn.showEnd();
    prompt.value = "";
    this.#setBusy(true);
    try {
      await this.#stream({ ...request(model, messages), ...form }, turn);
      if (this.#messages === conversation) this.#messages = [...messages, turn.message()];
    } catch (error) {
      if (this.#messages !== conversation) return;
      if (turn.text === "") {
        turn.root.previousElementSibling.remove();
        turn.root.remove();
        prompt.value = text; // to try again
      }
      byId("playground-error").textContent = error instanceof ApiError ? error.message : String(error);
    } finally {
      this.#setBusy(false);
    }
  }

  async #stream(body, turn) {
    const aborter = (this.#aborter = new AbortController());
    this.#stats.begin();
    try {
      const response = await post("v1/chat/completions", body, { signal: aborter.signal });
      for await (const chunk of events(response)) {
        const follows = turn.endIsSeen;
        const choice = chunk.choices[0];
        if (choice) this.#stats.count(turn.add(choice));
        if (chunk.metrics) this.#stats.end(chunk.metrics.speculative_decoding, chunk.usage);
        if (follows) turn.showEnd();
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      turn.finishReason = "stopped";
    } finally {
      const follows = turn.endIsSeen;
      turn.end(this.#stats.summary());
      if (follows) turn.showEnd();
    }
  }

  #setBusy(busy) {
    if (!busy) this.#aborter = null;
    setBusy(busy);
    byId("turns").ariaBusy = String(busy); // read out when it is complete, not token by token
    if (!busy && document.activeElement === document.body) byId("prompt").focus();
  }
}

/** Fields that give the answer a form: an object is its schema, a list has the tools. Null if it is not JSON. */
function formOfAnswer() {
  const text = byId("form").value.trim();
  if (text === "") return {};
  let form;
  try {
    form = JSON.parse(text);
  } catch {
    return null;
  }
  if (Array.isArray(form)) return { tools: form };
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: form } } };
}

function request(model, messages) {
  const system = byId("system-prompt").value.trim();
  return {
    model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: byId("temperature").valueAsNumber || 0,
    top_p: byId("top-p").valueAsNumber || undefined,
    seed: Number.isNaN(byId("seed").valueAsNumber) ? undefined : byId("seed").valueAsNumber,
    max_tokens: byId("max-tokens").valueAsNumber || 200,
    speculative: byId("speculative").checked ? undefined : false,
    stream: true,
    stream_options: { include_usage: true },
    logprobs: true, // with them come the texts of single tokens
    return_draft_status: true,
    return_metrics: true,
  };
}
