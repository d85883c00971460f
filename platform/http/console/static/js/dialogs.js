// The question before something that cannot be taken back. The dialog stays open while it is done, and shows its error.

import { byId } from "./dom.js";

/** Asks; on yes runs `action`, and closes when it has succeeded. */
export function confirm({ title, text, yes, action }) {
  const dialog = byId("confirm-dialog");
  const [confirmed, cancelled, error] = [byId("confirm-yes"), byId("confirm-no"), byId("confirm-error")];
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  confirmed.textContent = yes;
  error.textContent = "";
  confirmed.disabled = false;
  cancelled.onclick = () => dialog.close();
  confirmed.onclick = async () => {
    confirmed.disabled = true;
    error.textContent = "";
    try {
      await action();
      dialog.close();
    } catch (problem) {
      error.textContent = problem.message;
    } finally {
      confirmed.disabled = false;
    }
  };
  dialog.showModal();
  cancelled.focus();
}
