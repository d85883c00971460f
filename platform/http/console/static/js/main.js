// The console's frame: signing in and out, the server's state, and which section is looked at.

import { setUpAdapters } from "./adapters.js";
import { setKey } from "./api.js";
import { byId, setText, show } from "./dom.js";
import { Live } from "./live.js";
import { Models } from "./models.js";
import { setUpOverview } from "./overview.js";
import { setUpPlayground } from "./playground.js";
import { Tenants } from "./tenants.js";
import { setUpTheme } from "./theme.js";

const STATES = {
  starting: "The engine is starting.",
  restarting: "The engine has died and is being started again; requests get errors until then.",
  draining: "The server is shutting down: running requests finish, new ones are refused.",
  stopped: "The engine has stopped and could not be started again.",
  unreachable: "The server cannot be reached. What is shown is what it said last; the console keeps trying.",
};

const live = new Live();
const models = new Models();
const tenants = new Tenants();

async function signIn(key) {
  setKey(key);
  await live.start({ key });
  show(byId("login"), false);
  for (const id of ["console", "sections", "state"]) show(byId(id), true);
  show(byId("sign-out"), Boolean(key)); // an open server has no sign-in
  await models.start();
}

function signOut(message = "") {
  setKey(null);
  live.stop();
  models.stop();
  tenants.stop();
  playground.reset();
  for (const id of ["console", "sections", "state", "sign-out", "banner"]) show(byId(id), false);
  byId("key").value = "";
  setText(byId("login-error"), message);
  show(byId("login"), true);
  byId("key").focus();
}

function explain(error) {
  if (error.status === 401) return "The server does not know this key.";
  if (error.status === 403) return "This key is valid, but it is not an operator's: it has not the scope admin.";
  return error.message;
}

function showState(state) {
  const pill = byId("state");
  pill.dataset.state = state;
  setText(pill, state);
  const banner = byId("banner");
  setText(banner, STATES[state] ?? "");
  show(banner, state in STATES);
}

function followSections() {
  const links = [...byId("sections").querySelectorAll("a")];
  const visible = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) visible[isIntersecting ? "add" : "delete"](target.id);
    const current = links.find((link) => visible.has(link.hash.slice(1)));
    for (const link of links) {
      if (link === current) link.ariaCurrent = "true";
      else link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-80px 0px -45% 0px" });
  for (const link of links) observer.observe(byId(link.hash.slice(1)));
}

setUpTheme(byId("theme"));
setUpOverview(live);
setUpAdapters(live, models);
tenants.follow(live);
const playground = setUpPlayground(models);
followSections();
let restarts = 0;
live.listen((stats, points, error) => {
  if (error?.isAboutKey) signOut(explain(error));
  else showState(stats ? stats.server.state : "unreachable");
  if (stats && stats.server.engine_restarts !== restarts) {
    restarts = stats.server.engine_restarts;
    models.refresh(); // some adapters may not have come back
  }
});

byId("sign-out").onclick = () => signOut();
byId("login").onsubmit = async (event) => {
  event.preventDefault();
  const problem = byId("login-error");
  problem.textContent = "";
  try {
    await signIn(byId("key").value.trim());
    byId("main").focus();
  } catch (error) {
    setKey(null);
    setText(problem, explain(error));
    byId("key").select();
  }
};

// A key of this tab, or a server that needs none; else the form.
try {
  await signIn(sessionStorage.getItem("outrider.key"));
} catch (error) {
  signOut(error.isAboutKey ? "" : explain(error));
}
