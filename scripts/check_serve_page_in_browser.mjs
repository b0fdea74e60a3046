// Open the page of a running `skipdecode serve` in Chromium and check what only a browser knows: it decodes by keyboard alone,
// asks nobody else, complains about nothing, and never scrolls sideways, from a phone to a desktop, in light and dark.
//
//   npm install --no-save playwright-core
//   node scripts/check_serve_page_in_browser.mjs http://127.0.0.1:8000/ FOLDER [/usr/bin/chromium]
//
// Pictures go into FOLDER. Exits with 1 where something is wrong.

import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { chromium } from 'playwright-core';

const [address, folder, executablePath = '/usr/bin/chromium'] = process.argv.slice(2);
if (!folder) {
  console.error('usage: node scripts/check_serve_page_in_browser.mjs ADDRESS FOLDER [CHROMIUM]');
  process.exit(2);
}
mkdirSync(folder, { recursive: true });
const quiet = ['--disable-background-networking', '--disable-component-update', '--disable-sync', '--disable-quic'];
const browser = await chromium.launch({ executablePath, args: ['--no-sandbox', '--disable-gpu', '--no-first-run', ...quiet] });
const wrong = [];
for (const colorScheme of ['light', 'dark']) {
  for (const width of [360, 768, 1280]) {
    const name = `${width}-${colorScheme}`;
    const page = await browser.newPage({ viewport: { width, height: 900 }, colorScheme });
    page.on('console', (message) => wrong.push(`${name}: the console says ${message.text()}`));
    page.on('pageerror', (error) => wrong.push(`${name}: ${error}`));
    page.on('request', (request) => {
      if (new URL(request.url()).origin !== new URL(address).origin) wrong.push(`${name}: asks for ${request.url()}`);
    });
    await page.goto(address);
    await page.keyboard.press('Tab');
    if ((await page.evaluate(() => document.activeElement.id)) !== 'prompt') wrong.push(`${name}: Tab doesn't reach the prompt`);
    if (!(await page.inputValue('#prompt'))) wrong.push(`${name}: no example is filled in`);
    await page.keyboard.press('Tab');
    await page.keyboard.press('End'); // the fastest
    await page.keyboard.press('Control+Enter');
    await page.waitForFunction(() => /words differ|are the same/.test(document.getElementById('status').textContent), null, { timeout: 20000 });
    const [full, fast] = await page.$$eval('.text', (texts) => texts.map((text) => text.textContent));
    if (!full || !fast) wrong.push(`${name}: a text is empty`);
    const told = await page.textContent('#status');
    const marks = await page.$$eval('mark', (marks) => marks.length);
    if (marks !== Number(told.match(/^\d+/)?.[0] ?? 0)) wrong.push(`${name}: ${marks} words are marked, and it says: ${told}`);
    if ((full.trim() === fast.trim()) !== (marks === 0)) wrong.push(`${name}: marks of ${marks} words on ${full} | ${fast}`);
    const layers = await page.$$eval('.figures', (all) => all.map((each) => Number(each.textContent.match(/([\d.]+) layers/)?.[1])));
    if (!(layers[0] > layers[1])) wrong.push(`${name}: layers a token are ${layers}`);
    const wide = await page.evaluate(() =>
      [...document.querySelectorAll('body *')].filter((e) => !e.closest('svg') && e.getBoundingClientRect().right > innerWidth + 0.5)
        .map((e) => e.outerHTML.slice(0, 80)));
    for (const element of wide) wrong.push(`${name}: wider than the page: ${element}`);
    await page.screenshot({ path: join(folder, `${name}.png`), fullPage: true });
    await page.close();
  }
}
await browser.close();
for (const line of wrong) console.error(line);
console.log(wrong.length ? `${wrong.length} things are wrong` : `nothing is wrong; pictures: ${folder}`);
process.exit(wrong.length ? 1 : 0);
