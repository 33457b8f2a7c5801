// Builds the page: `node build.mjs FOLDER` writes all that the gateway serves under /ui into FOLDER.
import { createHash } from "node:crypto";
import { copyFile, mkdir, readFile, readdir, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { build } from "esbuild";

const out = process.argv[2];
await mkdir(out, { recursive: true });
await build({
  entryPoints: [
    { in: "src/main.ts", out: "ui" },
    { in: "src/style.css", out: "ui" },
  ],
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  charset: "utf8",
  legalComments: "none",
  outdir: out,
});
await copyFile("src/index.html", join(out, "index.html"));
const uplot = JSON.parse(await readFile("node_modules/uplot/package.json", "utf8"));
const licence = await readFile("node_modules/uplot/LICENSE", "utf8");
await writeFile(join(out, "licences.txt"), `uPlot ${uplot.version}\n\n${licence.trimEnd()}\n`);

// What it was built from, so that a test sees without npm whether it is out of date.
const digest = createHash("sha256");
for (const name of ["build.mjs", "package-lock.json", ...(await sources())]) {
  digest.update(`${name}\n`).update(await readFile(name));
}
await writeFile(join(out, "sources.sha256"), `${digest.digest("hex")}\n`);

async function sources() {
  return (await readdir("src")).sort().map((name) => `src/${name}`);
}
