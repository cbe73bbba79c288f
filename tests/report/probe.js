window.errors = [];
window.onerror = message => window.errors.push(String(message));
window.addEventListener('load', () => {
  const figures = [...document.querySelectorAll('svg')].map(svg => {
    const box = svg.getBoundingClientRect(), drawn = svg.getBBox();
    const marks = svg.querySelectorAll('rect,polyline,circle').length;
    return {width: box.width, height: box.height, drawn: drawn.width * drawn.height, marks};
  });
  const sizes = [...document.querySelectorAll('p,li,td,th,pre')].map(e => parseFloat(getComputedStyle(e).fontSize));
  const outside = e => !e.closest('.wide') && !e.closest('svg') && e.getBoundingClientRect().right > innerWidth + 1;
  parent.postMessage(JSON.stringify({
    errors: window.errors, figures, smallest: Math.min(...sizes),
    wide: [...document.querySelectorAll('body *')].filter(outside).map(e => e.tagName),
    inner: innerWidth, scroll: document.documentElement.scrollWidth, text: document.body.innerText.length,
    fetched: performance.getEntriesByType('resource').map(e => e.name)}), '*');
});
