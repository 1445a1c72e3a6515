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

  // What the address named when the page was opened, whatever has been written into it since.
  const PARTS = { world: ["from", "group"], compare: ["compare"] };
  const asked = new URL(performance.getEntriesByType("navigation")[0].name).searchParams;
  const read = (names) => Object.fromEntries(names.map((name) => [name, asked.get(name) ?? ""]));
  const places = { world: read(PARTS.world), compare: read(PARTS.compare) };

  const tabs = () => [...document.querySelectorAll('.tab-container [role="tab"]')];
  const nameOf = (tab) => tab?.textContent.trim().toLowerCase();
  const isOpen = (tab) => tab.getAttribute("aria-selected") === "true";

  // The address names the open tab, and of World and Compare what is seen there; the first tab needs no name.
  const write = () => {
    const [first, ...others] = tabs();
    if (!first) return;
    const tab = nameOf(others.find(isOpen)) ?? "";
    const address = new URL(window.location.href);
    const said = { tab, from: "", group: "", compare: "", ...places[tab] };
    for (const [key, value] of Object.entries(said)) {
      if (value) address.searchParams.set(key, value);
      else address.searchParams.delete(key);
    }
    if (address.href !== window.location.href) window.history.replaceState(window.history.state, "", address);
  };

  const stand = (tab, place) => {
    places[tab] = Object.fromEntries(PARTS[tab].map((name) => [name, String(place?.[name] ?? "")]));
    write();
  };

  // Gradio draws the page some time after it was loaded.
  const soon = (find, then) => {
    const look = () => {
      const found = find();
      if (found) observer.disconnect();
      if (found) then(found);
    };
    const observer = new MutationObserver(look);
    observer.observe(document.documentElement, { childList: true, subtree: true });
    look();
  };

  soon(
    () => tabs()[0],
    (first) => {
      const wanted = asked.get("tab");
      if (wanted) tabs().find((tab) => nameOf(tab) === wanted)?.click();
      const chosen = new MutationObserver(write);
      chosen.observe(first.parentElement, { attributes: true, attributeFilter: ["aria-selected"], subtree: true });
    },
  );

  // Who opens the address of a video comes for the video; on a phone it lies below the form.
  if (asked.get("job") && !asked.get("tab") && narrow()) {
    soon(
      () => document.querySelector("#progress ol"),
      () => document.getElementById("watch").scrollIntoView({ block: "start" }),
    );
  }

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

  window.page = { follow, stand };
})();
