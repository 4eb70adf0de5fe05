// One streamed chat completion with tools through the `stream()` helper of the official `openai` SDK;
// the message that it puts together is printed as one JSON object.
//
//     node tools.mjs '{"baseURL": …, "apiKey": …, "model": …, "tools": […]}'

import OpenAI from "openai";

const { baseURL, apiKey, model, tools } = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const stream = client.chat.completions.stream({
  model,
  messages: [{ role: "user", content: "Hello" }],
  tools,
  stream_options: { include_usage: true },
});
const { choices, usage } = await stream.finalChatCompletion();
console.log(JSON.stringify({ message: choices[0].message, finish_reason: choices[0].finish_reason, usage }));
