// One request with the JavaScript client; the argument is a job, the output its result, both JSON.
const { OpenAI } = require("openai");

const job = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: job.url, apiKey: "none", maxRetries: 0 });
const asked = { model: job.model, temperature: 0, messages: [{ role: "user", content: job.question }] };

const features = {
  async chat() {
    return (await client.chat.completions.create({ ...asked, max_tokens: 24 })).choices[0].message.content;
  },
  async stream() {
    const pieces = [];
    const chunks = await client.chat.completions.create({ ...asked, max_tokens: 24, stream: true });
    for await (const chunk of chunks) pieces.push(chunk.choices[0]?.delta.content ?? "");
    return pieces;
  },
  async tools() {
    const body = { ...asked, max_tokens: 80, tools: [job.tool], tool_choice: "required" };
    const runner = client.chat.completions.stream(body); // puts the deltas of the arguments together
    return (await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function;
  },
  async schema() {
    const json_schema = { name: "order", schema: job.schema, strict: true };
    const body = { ...asked, max_tokens: 80, response_format: { type: "json_schema", json_schema } };
    return JSON.parse((await client.chat.completions.parse(body)).choices[0].message.content);
  },
  async completion() {
    const body = { model: job.model, temperature: 0, prompt: job.prompt, max_tokens: 24 };
    return (await client.completions.create(body)).choices[0].text;
  },
  async logprobs() {
    const body = { model: job.model, prompt: job.question, echo: true, logprobs: 1, max_tokens: 1 };
    const { token_logprobs } = (await client.completions.create(body)).choices[0].logprobs;
    return token_logprobs.slice(1, -1).reduce((sum, value) => sum + value, 0);
  },
  async embeddings() {
    return (await client.embeddings.create({ model: job.model, input: [job.question] })).data[0].embedding;
  },
};

features[job.feature]().then(
  (result) => console.log(JSON.stringify(result)),
  (error) => { console.error(error); process.exitCode = 1; },
);
