// The form that loads an adapter.

import { post } from "./api.js";
import { byId, element, show } from "./dom.js";

const FIELDS = ["load-name", "load-path", "load-draft"];

/** `loaded(name)` is called when an adapter is there. */
export function setUpLoading(loaded) {
  const dialog = byId("load-dialog");
  const [submit, problem] = [byId("load-submit"), byId("load-error")];
  byId("load-adapter").onclick = () => {
    problem.textContent = "";
    dialog.showModal();
    byId("load-name").focus();
  };
  byId("load-cancel").onclick = () => dialog.close();
  byId("load-form").onsubmit = async (event) => {
    event.preventDefault();
    submit.disabled = true;
    problem.textContent = "";
    try {
      const body = request();
      await post("v1/load_lora_adapter", body);
      dialog.close();
      for (const id of FIELDS) byId(id).value = "";
      byId("load-pinned").checked = byId("load-inplace").checked = false;
      await loaded(body.lora_name);
    } catch (error) {
      problem.textContent = error.message;
    } finally {
      submit.disabled = false;
    }
  };
}

function request() {
  const [name, path, draft] = FIELDS.map((id) => byId(id).value.trim());
  const body = { lora_name: name, lora_path: path, pinned: byId("load-pinned").checked, load_inplace: byId("load-inplace").checked };
  if (draft) body.draft_path = draft;
  if (byId("load-tenant").value) body.tenant = byId("load-tenant").value;
  return body;
}

/** Offers to load for one of these tenants; an empty list: the server has none. */
export function offerTenants(names) {
  const select = byId("load-tenant");
  const chosen = select.value;
  select.replaceChildren(
    element("option", { value: "", textContent: "shared by all" }),
    ...names.map((name) => element("option", { value: name, textContent: name })),
  );
  select.value = names.includes(chosen) ? chosen : "";
  show(byId("load-tenant-field"), names.length > 0);
}
