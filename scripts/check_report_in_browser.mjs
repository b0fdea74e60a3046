// Open a page of `python -m eval.report` in Chromium and check what only a browser knows: nothing is asked for, nothing is
// complained about, and nothing makes the page scroll sideways, from a phone to a desktop, in light, dark and print.
//
//   npm install --no-save playwright-core
//   node scripts/check_report_in_browser.mjs report.html FOLDER [/usr/bin/chromium]
//
// Pictures of each and a PDF go into FOLDER. Exits with 1 where something is wrong.

import { mkdirSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import { chromium } from 'playwright-core';

const [report, folder, executablePath = '/usr/bin/chromium'] = process.argv.slice(2);
if (!folder) {
  console.error('usage: node scripts/check_report_in_browser.mjs report.html FOLDER [CHROMIUM]');
  process.exit(2);
}
const address = pathToFileURL(resolve(report)).href;
mkdirSync(folder, { recursive: true });

const quiet = ['--disable-background-networking', '--disable-component-update', '--disable-sync', '--disable-quic'];
const browser = await chromium.launch({
  executablePath,
  args: ['--no-sandbox', '--disable-gpu', '--no-first-run', ...quiet],
});
const wrong = [];
for (const colorScheme of ['light', 'dark']) {
  for (const width of [360, 375, 768, 1280]) {
    const name = `${width}-${colorScheme}`;
    const page = await browser.newPage({ viewport: { width, height: 900 }, colorScheme });
    page.on('console', (message) => wrong.push(`${name}: the console says ${message.text()}`));
    page.on('pageerror', (error) => wrong.push(`${name}: ${error}`));
    page.on('request', (request) => {
      if (request.url() !== address) wrong.push(`${name}: asks for ${request.url()}`);
    });
    await page.goto(address);
    const wide = await page.evaluate(() =>
      [...document.querySelectorAll('body, body *')]
        .filter((element) => !element.closest('.scroll table, svg'))
        .filter((element) => element.getBoundingClientRect().right > innerWidth + 0.5)
        .map((element) => element.outerHTML.slice(0, 80)),
    );
    for (const element of wide) wrong.push(`${name}: wider than the page: ${element}`);
    await page.screenshot({ path: join(folder, `${name}.png`), fullPage: true });
    if (name === '1280-light') {
      await page.pdf({ path: join(folder, 'print.pdf'), preferCSSPageSize: true });
      await page.emulateMedia({ media: 'print' });
      const closed = await page.evaluate(() =>
        [...document.querySelectorAll('details > :not(summary)')].filter((e) => !e.checkVisibility()).length,
      );
      if (closed) wrong.push(`print: ${closed} parts of closed details are not shown`);
    }
    await page.close();
  }
}
await browser.close();
for (const line of wrong) console.error(line);
console.log(wrong.length ? `${wrong.length} things are wrong` : `nothing is wrong; pictures: ${folder}`);
process.exit(wrong.length ? 1 : 0);
