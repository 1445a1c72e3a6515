"""The page: its tabs, the server that gives it out, and the command line.

python app.py [--preset tiny|pan2|file.toml] [--checkpoint FOLDER_OR_REPOSITORY] [--host ADDRESS] [--port N]
"""

from __future__ import annotations

from engine.web import lent

# isort: split
import argparse
import logging
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import fastapi
import gradio as gr
import uvicorn
from gradio.utils import get_upload_folder

from engine import broken
from engine.about import place_name
from engine.arguments import require_folder
from engine.devices import RULE, devices_from_environment
from engine.engine import Engine
from engine.errors import EngineError, ResourceError, shown
from engine.guardrail import guarded, in_words
from engine.janitor import Keep
from engine.jobs import Jobs
from engine.preset import preset_from_environment, preset_names
from engine.web import details, mcp, zero
from engine.web.api import add_api
from engine.web.compare_api import add_compare_api
from engine.web.compare_routes import compare_router
from engine.web.compare_tab import CompareTab
from engine.web.decode_api import add_decode_api
from engine.web.files import visitor
from engine.web.gate import Gate
from engine.web.generate_tab import PLAIN, QUIET, GenerateTab
from engine.web.history_tab import HistoryTab
from engine.web.hosting import Hosting
from engine.web.live import LiveSource, live_router
from engine.web.metrics import Metrics, metrics_router
from engine.web.routes import asset_router, health_router, video_router
from engine.web.theme import HEAD, theme
from engine.web.world_routes import world_router
from engine.web.world_tab import WorldTab

log = logging.getLogger("app")

# Uploads are looked through every ten minutes and kept for a day.
DELETE_CACHE = (600, 86_400)
# Latents of 20 s at 1248 x 704 are 77 MiB.
LARGEST_UPLOAD = "128mb"
# What an upload's request holds besides the file.
MULTIPART_BYTES = 64 * 2**10


class Page:
    """The tabs, in their order, and the tab on the machine. listed: whether visitors see, and may delete, what others
    made, and see where things lie on the machine."""

    def __init__(self, engine: Engine, jobs: Jobs, listed: bool = True) -> None:
        self.engine, self.listed = engine, listed
        with gr.Blocks(
            title=engine.preset.title, analytics_enabled=False, fill_width=True, delete_cache=DELETE_CACHE
        ) as self.demo:
            self.generate, world = GenerateTab(engine, jobs), WorldTab(engine, jobs, listed)
            self.history, compare = HistoryTab(engine, jobs, self.generate), CompareTab(engine, jobs, listed)
            with gr.Tabs() as tabs:
                for tab in (self.generate, world):
                    tab.build(self.demo)
                if listed:
                    self.history.build(self.demo, tabs)
                compare.build(self.demo)
                if listed:
                    self.history.lead_to(compare)
                self._system_tab()
            world.come_from(self.generate.onward, self.generate.job, tabs)
            add_api(engine.preset, jobs)
            add_decode_api(engine, jobs)
            add_compare_api(engine, jobs)

    def _system_tab(self) -> None:
        with gr.Tab("System") as tab:
            system = gr.HTML(elem_id="system", **PLAIN)
        gr.on([self.demo.load, tab.select], self.tell_system, None, system, **QUIET)

    def tell_system(self) -> str:
        """Model, devices, precision, decoder path, versions, memory."""
        about = {"Guardrail": in_words(self.engine)} | self.engine.about() | {"gradio": gr.__version__}
        if not self.listed and "Checkpoint" in about:
            about["Checkpoint"] = place_name(about["Checkpoint"])
        return details.system(about, self.engine.paths(), self.engine.readiness(), self.engine.memory())


def build(engine: Engine, jobs: Jobs, listed: bool = True) -> gr.Blocks:
    """The whole page. engine: for readiness, estimates and facts; jobs: does the work; listed: as of `Page`."""
    return Page(engine, jobs, listed).demo


def server(engine: Engine, jobs: Jobs, hosting: Hosting | None = None) -> Gate:
    """The page and its routes, behind the gate. The model is loaded beside it, so that the port answers at once."""
    hosting = hosting or Hosting()

    @asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=_load, args=(engine,), name="load", daemon=True).start()
        yield
        jobs.close()
        engine.close()

    app = fastapi.FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(health_router(engine.readiness))
    app.include_router(asset_router())
    app.include_router(video_router(jobs.snapshot))
    app.include_router(compare_router(jobs.comparison))
    app.include_router(world_router(jobs.snapshot))
    app.include_router(live_router(lambda job: _live_source(jobs, job)))
    if hosting.mcp:
        mcp.require()
    if hosting.metrics:
        app.include_router(metrics_router(Metrics(jobs, engine.memory)))
    demo = build(engine, jobs, listed=not hosting.public).queue(max_size=64, api_open=False)
    # Gradio checks that files were really uploaded, and treats SVG as unsafe, only in a page that it launched itself;
    # in a mounted one, any file of the server could be asked for.
    demo.has_launched = demo.is_running = True
    if lent.HERE:
        zero.tell_port(demo, hosting.port)
    gr.mount_gradio_app(
        app,
        demo,
        "/",
        allowed_paths=[str(jobs.outputs.resolve())],
        max_file_size=LARGEST_UPLOAD,
        enable_monitoring=False,
        run_history=False,
        footer_links=["api", "settings"],
        show_error=False,
        pwa=False,
        ssr_mode=False,
        theme=theme(),
        head=HEAD,
        mcp_server=hosting.mcp,
    )
    if hosting.mcp:
        mcp.connect(demo, hosting)
    return Gate(app, hosting, lambda: Path(get_upload_folder()), demo.max_file_size + MULTIPART_BYTES)


def _live_source(jobs: Jobs, job: str) -> LiveSource | None:
    state = jobs.snapshot(job)

    def finished() -> bool:
        # It may be deleted while its video still plays.
        now = jobs.snapshot(job)
        return jobs.closing or now is None or now.over

    return state and LiveSource(state.live, finished)


class Server(uvicorn.Server):
    """Ends what would go on by itself before it waits for its connections: jobs, and videos that are followed live."""

    def __init__(self, config: uvicorn.Config, jobs: Jobs) -> None:
        super().__init__(config)
        self.jobs = jobs

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        self.jobs.stop()
        await super().shutdown(sockets)


def _load(engine: Engine) -> None:
    try:
        engine.load()
    except EngineError as error:
        log.error("%s", error)
    except Exception:
        log.exception("the model could not be loaded")


def parser() -> argparse.ArgumentParser:
    """The arguments; what is left out comes from the environment."""
    parser = argparse.ArgumentParser("app.py", description="The page: from a prompt to a video.")
    parser.add_argument("--preset", help=f"{', '.join(preset_names())}, or a .toml file (ENGINE_PRESET)")
    parser.add_argument("--checkpoint", help="a folder, or a repository on the Hub (ENGINE_CHECKPOINT)")
    parser.add_argument("--devices", default=devices_from_environment(), help=f"{RULE} (ENGINE_DEVICES)")
    parser.add_argument("--outputs", type=Path, help="folder for jobs (ENGINE_OUTPUTS)")
    parser.add_argument("--host", help="address to listen on (GRADIO_SERVER_NAME)")
    parser.add_argument("--port", type=_port, help="port to listen on (GRADIO_SERVER_PORT)")
    return parser


def settings(arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Hosting:
    """What the arguments say, else the environment. Raises RequestError."""
    given = ("preset", "checkpoint", "outputs", "host", "port")
    return Hosting.read(environment, **{name: getattr(arguments, name) for name in given})


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to 65535")
    return int(text)


def _outputs(folder: Path) -> Path:
    """The folder for jobs, made if need be, as that for uploads. Raises RequestError if one can't be written."""
    require_folder("--outputs", folder)
    require_folder("The folder for uploads (GRADIO_TEMP_DIR)", Path(get_upload_folder()))
    return folder


def _listen(hosting: Hosting) -> socket.socket:
    """The port, taken. Raises ResourceError if that can't be done."""
    family = socket.AF_INET6 if ":" in hosting.host else socket.AF_INET
    try:
        return socket.create_server((hosting.host, hosting.port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise ResourceError(
            f"The server can't listen on {shown(hosting.host)}, port {hosting.port} ({error}). Choose an address of "
            "this machine with --host (GRADIO_SERVER_NAME), and a free port with --port (GRADIO_SERVER_PORT)."
        ) from error


def main() -> None:
    """Serve the page until it is interrupted."""
    arguments = parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for chatty in ("httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        hosting = settings(arguments)
        preset = preset_from_environment(hosting.preset, hosting.checkpoint)
        outputs = _outputs(hosting.outputs)
        engine = Engine(preset, arguments.devices, measured=not lent.HERE)
        engine = zero.lend(guarded(engine, hosting.guardrail, hosting.public))
        # Bound before the model is loaded: a port that is taken is said at once, and a waiting visitor is let in.
        listener = _listen(hosting)
        jobs = Jobs(engine, outputs, Keep.from_environment(), hosting.queue_limits(), visitor)
        page = server(engine, jobs, hosting)
    except EngineError as error:
        raise SystemExit(str(error)) from error
    # A page keeps a connection open for as long as it is shown; an interrupt must not wait for that.
    config = uvicorn.Config(
        page,
        host=hosting.host,
        port=hosting.port,
        # The gate says whose word counts.
        proxy_headers=False,
        log_level="warning",
        timeout_graceful_shutdown=2,
    )
    print(f"{preset.title}: http://{hosting.host}:{hosting.port}", flush=True)
    # The server ends in order on an interrupt and then raises it again.
    with suppress(KeyboardInterrupt):
        Server(config, jobs).run(sockets=[listener])


if __name__ == "__main__":
    main()
    broken.leave(0)
