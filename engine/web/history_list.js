// Buttons of the list of videos: each names an event and a job. Deleting asks once, in place, since a dialog of the
// browser's own does not open inside of another site's frame.
const SURE_MS = 5000;

const settle = (button) => {
  clearTimeout(button.timer);
  button.textContent = button.label;
  button.classList.remove("sure");
};

const ask = (button) => {
  button.label = button.textContent;
  button.textContent = button.dataset.sure;
  button.classList.add("sure");
  button.timer = setTimeout(() => settle(button), SURE_MS);
};

element.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-event]");
  if (!button) return;
  if (button.dataset.sure && !button.classList.contains("sure")) return ask(button);
  if (button.dataset.sure) settle(button);
  trigger(button.dataset.event, { job: button.dataset.job ?? "", page: Number(button.dataset.page ?? 0) });
});
