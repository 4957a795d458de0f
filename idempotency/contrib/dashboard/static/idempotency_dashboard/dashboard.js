/* Draws the dashboard's chart from the numbers in the page, in the colours of the admin's theme. */
(() => {
    "use strict";

    const place = document.getElementById("idempotency-chart");
    const { hours, series } = JSON.parse(document.getElementById("idempotency-chart-data").textContent);
    // These differ in lightness too, for readers who can't tell colours apart, and can be read on light and dark.
    const colours = ["#2f8f5b", "#3b82d6", "#d69a1f", "#a05fd0", "#d4622a", "#8a8a8a", "#d43f4f"];
    let chart = null;

    function draw() {
        const style = getComputedStyle(document.documentElement);
        const text = style.getPropertyValue("--body-fg").trim() || getComputedStyle(place).color;
        const line = style.getPropertyValue("--hairline-color").trim() || "rgb(128 128 128 / 40%)";
        const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
        if (chart !== null) chart.destroy();
        chart = new uPlot(
            {
                width: place.clientWidth,
                height: 260,
                // Without a pointer above the chart, the legend shows the latest hour.
                hooks: { setLegend: [(u) => u.legend.idx ?? u.setLegend({ idx: hours.length - 1 }, false)] },
                scales: { y: { range: (u, low, high) => [0, Math.max(1, high)] } },
                axes: [{ ...axis, values: [[3600, "{HH}:00", "\n{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1]] }, { ...axis, size: 60 }],
                series: [
                    { label: "", value: "{YYYY}-{MM}-{DD} {HH}:00" },
                    ...series.map(([label], number) => ({
                        label,
                        stroke: colours[number % colours.length],
                        width: 2,
                        points: { show: false },
                    })),
                ],
            },
            [hours, ...series.map(([, values]) => values)],
            place,
        );
        chart.setLegend({ idx: hours.length - 1 });
    }

    draw();
    new ResizeObserver(() => {
        if (chart.width !== place.clientWidth) chart.setSize({ width: place.clientWidth, height: 260 });
    }).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["class", "data-theme"] });
})();
