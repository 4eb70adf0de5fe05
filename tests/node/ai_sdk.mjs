// One streamText of the Vercel AI SDK through @ai-sdk/openai-compatible; what it saw is printed as
// one JSON object.
//
//     node ai_sdk.mjs '{"baseURL": …, "apiKey": …, "model": …, "tools": true}'
//
// Also: include_usage, max_retries (0), abort_after: N, which hangs up after N text deltas, and
// steps: N, which answers tool calls and asks again, N times at most.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { isStepCount, jsonSchema, streamText, tool } from "ai";

const options = JSON.parse(process.argv[2]);
const seen = {
  text: "",
  deltas: 0,
  input_deltas: 0,
  calls: [],
  results: [],
  finish_reason: null,
  usage: null,
  aborted: false,
  error: null,
};
const abort = new AbortController();

const gateway = createOpenAICompatible({
  name: "sluicegate",
  baseURL: options.baseURL,
  apiKey: options.apiKey,
  includeUsage: options.include_usage ?? false,
});
const tools = {
  get_weather: tool({
    description: "The weather of a city",
    inputSchema: jsonSchema({
      type: "object",
      properties: { city: { type: "string" }, days: { type: "integer" } },
      required: ["city"],
    }),
    execute: options.steps ? async ({ city }) => `Sunny in ${city}` : undefined,
  }),
};

function note(part) {
  switch (part.type) {
    case "text-delta":
      seen.text += part.text;
      seen.deltas += 1;
      if (seen.deltas === options.abort_after) abort.abort();
      break;
    case "tool-input-delta":
      seen.input_deltas += 1;
      break;
    case "tool-call":
      seen.calls.push({ id: part.toolCallId, name: part.toolName, input: part.input });
      break;
    case "tool-result":
      seen.results.push(part.output);
      break;
    case "finish":
      seen.finish_reason = part.finishReason;
      seen.usage = part.totalUsage;
      break;
    case "abort":
      seen.aborted = true;
      break;
    case "error":
      tell(part.error);
      break;
  }
}

function tell(error) {
  seen.error = {
    name: error?.name ?? null,
    message: error?.message ?? String(error),
    status: error?.statusCode ?? null,
  };
}

try {
  const result = streamText({
    model: gateway.chatModel(options.model),
    prompt: "Hello",
    tools: options.tools ? tools : undefined,
    stopWhen: isStepCount(options.steps ?? 1),
    maxRetries: options.max_retries ?? 0,
    abortSignal: abort.signal,
    onError: () => {}, // it comes as a part too
  });
  for await (const part of result.stream) note(part);
} catch (error) {
  tell(error);
}
console.log(JSON.stringify(seen));
