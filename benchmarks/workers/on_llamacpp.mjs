// llama.cpp through node-llama-cpp, plain or with its input lookup. Speaks as worker.py does; run in the folder that
// has node_modules, with the settings as the first argument.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const settings = JSON.parse(process.argv[2]);
const modules = join(settings.environment, "node_modules", "node-llama-cpp");
const { getLlama, LlamaLogLevel, InputLookupTokenPredictor } = await import(
  pathToFileURL(join(modules, "dist", "index.js")).href
);

function memory(field) {
  const found = readFileSync("/proc/self/status", "utf8").match(new RegExp(`${field}:\\s+(\\d+) kB`));
  return (Number(found[1]) * 1024) / 1e6;
}

const imports = memory("VmRSS");
const llama = await getLlama({ gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: settings.threads });
const model = await llama.loadModel({ modelPath: settings.gguf });
const context = await model.createContext({
  contextSize: settings.longest + settings.max_new_tokens + 64,
  batchSize: settings.longest + 64,
  threads: { ideal: settings.threads, min: settings.threads },
  flashAttention: true,
});
const lookup = settings.mode === "lookup";
const predictor = lookup
  ? new InputLookupTokenPredictor({ patternLength: { min: 2 }, predictionLength: { min: 1, max: settings.lookup_tokens } })
  : undefined;
const sequence = context.getSequence(lookup ? { tokenPredictor: predictor } : {});
const packaged = JSON.parse(readFileSync(join(modules, "package.json"), "utf8"));
const release = llama.llamaCppRelease?.release ?? "unknown";
console.log(
  JSON.stringify({ versions: { "node-llama-cpp": packaged.version, "llama.cpp": release }, imports_mb: imports, notes: "" }),
);

for await (const line of createInterface({ input: process.stdin })) {
  const { ids } = JSON.parse(line);
  await sequence.clearHistory(); // a prompt that comes again is to be read again
  const answer = [];
  let first = 0;
  const start = performance.now();
  for await (const token of sequence.evaluate(ids, { temperature: 0, yieldEogToken: true })) {
    if (first === 0) first = performance.now() - start;
    answer.push(token);
    if (answer.length === settings.max_new_tokens) break;
  }
  const seconds = (performance.now() - start) / 1e3;
  console.log(
    JSON.stringify({
      ids: answer,
      seconds,
      first_seconds: first / 1e3,
      first_tokens: 1,
      rounds: lookup ? null : answer.length - 1,
      peak_mb: memory("VmHWM"),
    }),
  );
}
process.exit(0);
