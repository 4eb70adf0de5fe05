// One chat completion through the official `openai` SDK; what it saw is printed as one JSON object.
//
//     node stream.mjs '{"baseURL": …, "apiKey": …, "model": …, "stream": true}'
//
// Also: include_usage, headers, messages, params (more request fields), max_retries (0), and
// abort_after: N, which hangs up after N chunks.

import OpenAI from "openai";

const options = JSON.parse(process.argv[2]);
const seen = {
  text: "",
  chunks: 0,
  finish_reason: null,
  usage: null,
  models: new Set(),
  providers: new Set(),
  error: null,
};
const abort = new AbortController();

function note(answer) {
  seen.chunks += 1;
  if (answer.model !== undefined) seen.models.add(answer.model);
  if (answer.provider !== undefined) seen.providers.add(answer.provider);
  if (answer.usage) seen.usage = answer.usage;
  for (const choice of answer.choices) {
    seen.text += (choice.delta ?? choice.message).content ?? "";
    if (choice.finish_reason) seen.finish_reason = choice.finish_reason;
  }
}

async function run() {
  const client = new OpenAI({
    baseURL: options.baseURL,
    apiKey: options.apiKey,
    defaultHeaders: options.headers,
    maxRetries: options.max_retries ?? 0,
  });
  const body = {
    model: options.model,
    messages: options.messages ?? [{ role: "user", content: "Hello" }],
    stream: options.stream ?? true,
    ...options.params,
  };
  if (options.include_usage !== undefined) {
    body.stream_options = { include_usage: options.include_usage };
  }
  const answer = await client.chat.completions.create(body, { signal: abort.signal });
  if (!body.stream) return note(answer);
  for await (const chunk of answer) {
    note(chunk);
    if (seen.chunks === options.abort_after) abort.abort();
  }
}

try {
  await run();
} catch (error) {
  seen.error = {
    message: error.message,
    status: error.status ?? null,
    code: error.code ?? null,
  };
}
console.log(JSON.stringify({ ...seen, models: [...seen.models], providers: [...seen.providers] }));
