// The few things that the server can't do for the page.
(() => {
  const narrow = () => window.matchMedia("(max-width: 800px)").matches;

  // The address names the job, so that it can be found again after a reload or on another machine.
  const follow = (job) => {
    if (!job) return;
    const address = new URL(window.location.href);
    if (address.searchParams.get("job") === job) return;
    address.searchParams.set("job", job);
    window.history.replaceState(window.history.state, "", address);
    if (narrow()) document.getElementById("watch")?.scrollIntoView({ behavior: "smooth", block: "start" });
  };

  const copy = async (text) => {
    if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
    // Browsers give the clipboard to https and localhost only; this older way works everywhere.
    const field = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  };

  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("button[data-copy]");
    const source = button && document.getElementById(button.dataset.copy);
    if (!source) return;
    const label = button.textContent;
    await copy(source.textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 1500);
  });

  window.page = { follow };
})();
