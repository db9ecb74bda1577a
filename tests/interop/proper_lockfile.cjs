// proper-lockfile, as programs use it: node proper_lockfile.cjs MODULES FILE ROUNDS: that many sections that count up.
const fs = require("node:fs");
const [modules, file, rounds] = process.argv.slice(2);
const lockfile = require(`${modules}/proper-lockfile`);

(async () => {
  for (let round = 0; round < Number(rounds); round++) {
    const release = await lockfile.lock(file, { retries: { retries: 2000, minTimeout: 2, maxTimeout: 20 } });
    fs.writeFileSync(file, String(Number(fs.readFileSync(file, "ascii")) + 1));
    await release();
  }
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
