"""Several pictures and videos in one conversation, and what is refused before anything is sent."""

import base64
import json
import re
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from playwright.sync_api import JSHandle, Page, Route, expect

from snugvl.core.messages import Capabilities, Picture, Request, Text, Video
from snugvl.core.training import Training
from snugvl.inputs.image import FORMATS
from snugvl.server import page as routes
from snugvl.server.media.loading import MediaSettings
from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S, until
from tests.server.fake import CAPABILITIES, FakeService, Script
from tests.server.live import live
from tests.server.page.conftest import (
    ALL_WRITTEN,
    OpenPage,
    PageOf,
    Serve,
    answers,
    ask,
    choose,
    detect,
    model_unknown,
    provoked,
    tab,
    take_sample,
)

SEES_VIDEO = replace(CAPABILITIES, video=True)
UNLEARNED_VIDEO = replace(SEES_VIDEO, training=Training(videos=False))  # as pocket
FILES = """(files) => {
    const transfer = new DataTransfer();
    for (const [bytes, name] of files) {
        transfer.items.add(new File([new Uint8Array(bytes)], name, { type: "image/png" }));
    }
    return transfer;
}"""


def png(color: str, width: int = 40, height: int = 30) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def animation() -> bytes:
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "green", "blue")]
    file = BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=500, loop=0)
    return file.getvalue()


def transfer(page: Page, *colors: str) -> JSHandle:
    return page.evaluate_handle(FILES, [[list(png(color)), f"{color}.png"] for color in colors])


def names(page: Page) -> list[str]:
    """Pictures in the tray, as a screen reader hears them."""
    return [button.get_attribute("aria-label") or "" for button in page.locator("#tray .thumb").all()]


def colors(message: Any) -> list[tuple[int, ...]]:
    return [part.image.getpixel((5, 5)) for part in message.content if isinstance(part, Picture)]


def test_three_pictures_go_with_one_question(page_of: PageOf, tmp_path: Path) -> None:
    service = FakeService()
    page = page_of(service)
    for color in ("red", "lime"):
        (tmp_path / f"{color}.png").write_bytes(png(color))
    page.set_input_files("#file", [tmp_path / "red.png", tmp_path / "lime.png"])
    expect(page.locator("#tray li")).to_have_count(2)
    page.evaluate(
        "(clipboardData) => document.dispatchEvent(new ClipboardEvent('paste', { clipboardData }))",
        transfer(page, "blue"),
    )
    expect(page.locator("#tray li")).to_have_count(3)
    page.dispatch_event("body", "drop", {"dataTransfer": transfer(page, "black", "white")})
    expect(page.locator("#tray li")).to_have_count(5)
    expect(page.locator("#tray-facts")).to_have_text("5 pictures will go with the next question.")
    for name in ("lime.png", "black.png"):
        page.get_by_role("button", name=f"Remove {name}").click()
    assert names(page) == [
        f"Show picture {i}, not sent yet" for i in ("1: red.png", "2: blue.png", "3: white.png")
    ]
    ask(page, "What are they?")
    expect(answers(page)).to_have_count(1)
    expect(page.locator("#tray-facts")).to_be_hidden()
    expect(page.get_by_role("button", name="Remove")).to_have_count(0)  # they belong to a question
    expect(page.locator(".turn.user .turn-pictures .thumb")).to_have_count(3)
    page.set_input_files("#file", tmp_path / "lime.png")
    expect(page.locator("#tray li")).to_have_count(4)
    ask(page, "And this?")
    expect(answers(page)).to_have_count(2)
    first, _, second = service.requests[-1].messages
    assert colors(first) == [(255, 0, 0), (0, 0, 255), (255, 255, 255)]
    assert colors(second) == [(0, 255, 0)]


def test_tasks_can_be_about_the_picture_on_the_stage_alone(page_of: PageOf) -> None:
    service = FakeService()
    page = page_of(service)
    page.dispatch_event("body", "drop", {"dataTransfer": transfer(page, "red", "lime")})
    expect(page.locator("#picture-facts")).to_contain_text("lime.png")
    page.get_by_role("button", name="Show picture 1: red.png").click()
    expect(page.locator("#picture-facts")).to_contain_text("red.png")
    expect(page.get_by_role("button", name="Show picture 1: red.png")).to_be_focused()
    expect(page.locator("#scope")).to_be_hidden()  # a question goes with all of them
    tab(page, "Caption")
    page.get_by_label("Only red.png, which is shown").check()
    page.get_by_role("button", name="Caption the picture").click()
    expect(page.locator("#caption-result p")).to_have_text(["Hello there"])
    expect(page.locator("#caption-result h3")).to_have_text(["1: red.png"])  # there is another
    assert [colors(request.messages[-1]) for request in service.requests] == [[(255, 0, 0)]]
    for name in ("red.png", "lime.png"):
        page.get_by_role("button", name=f"Remove {name}").click()
    expect(page.get_by_text("Show the model a picture")).to_be_visible()
    expect(page.locator("#caption-result")).to_be_hidden()
    take_sample(page, "Sign")  # the samples are back


def test_no_more_than_sixteen_go_with_one_question(page_of: PageOf) -> None:
    page = page_of(FakeService())
    page.dispatch_event("body", "drop", {"dataTransfer": transfer(page, *["red"] * 17)})
    expect(page.locator("#picture-error")).to_have_text(
        "red.png is one too many: at most 16 pictures go with one question."
    )
    expect(page.locator("#tray li")).to_have_count(16)


def test_many_files_give_one_message(page_of: PageOf, tmp_path: Path) -> None:
    page = page_of(FakeService())
    paths = [tmp_path / f"{index}.png" for index in range(20)]
    for path in paths:
        path.write_bytes(png("red"))
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.7\n")
    (tmp_path / "b.pdf").write_bytes(b"%PDF-1.7\n")
    page.set_input_files("#file", [tmp_path / "a.pdf", tmp_path / "b.pdf", *paths])
    expect(page.locator("#tray li")).to_have_count(16)
    expect(page.locator("#picture-error")).to_have_text(
        "6 of 22 files were not taken.\n\n"
        "a.pdf, b.pdf: each is a PDF, which can't be read here. Save the page that you need as PNG.\n\n"
        "16.png, 17.png, 18.png and 1 more are too many: at most 16 pictures go with one question.",
        use_inner_text=True,
    )


def test_a_model_that_tells_few_pictures_apart_is_shown_no_more(
    serve: Serve, open_page: OpenPage, tmp_path: Path
) -> None:
    few = replace(CAPABILITIES, training=Training(drawings=True, min_images=1, max_images=2))
    page = open_page(serve(FakeService(capabilities=few), ServerSettings(names=("a-copy",))))
    expect(page.locator("#pocket-note")).to_be_visible()  # whatever the name
    expect(page.locator("#pocket-note")).not_to_contain_text("like pocket")  # which it may be
    ask(page, "Hello?")
    expect(page.locator("#ask-form .error")).to_contain_text("Choose a picture first")
    page.dispatch_event("body", "drop", {"dataTransfer": transfer(page, "red", "lime", "blue")})
    expect(page.locator("#picture-error")).to_have_text(
        "blue.png is one too many: this model can't tell more than 2 pictures of one conversation apart."
    )
    ask(page, "And now?")
    expect(answers(page)).to_have_count(1)
    page.dispatch_event("body", "drop", {"dataTransfer": transfer(page, "blue")})  # sent ones count too
    expect(page.locator("#picture-error")).to_contain_text("blue.png is one too many")
    talkative = open_page(serve(FakeService(), ServerSettings(names=("pocket",))))  # nor the other way round
    expect(talkative.locator("#state")).to_have_text("ready")
    ask(talkative, "Hello?")
    expect(answers(talkative)).to_have_count(1)


REFUSED = {
    "empty.png": (b"", "empty.png is empty: it holds no bytes."),
    "logo.svg": (
        b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>',
        "logo.svg is an SVG drawing",
    ),
    "notes.png": (b"bread, milk, eggs", "notes.png is not a picture but a text file."),
    "page.pdf": (
        b"%PDF-1.7\n",
        "page.pdf is a PDF, which can't be read here. Save the page that you need as PNG.",
    ),
    "photo.heic": (b"\0\0\0\x18ftypheic" + bytes(64), "photo.heic is a HEIC photo"),
    "clip.mp4": (
        b"\0\0\0\x18ftypmp42" + bytes(64),
        "clip.mp4 is a video, and this model does not understand videos.",
    ),
    "noise.bin": (bytes(range(256)), "noise.bin is not a picture. PNG, JPEG and WebP work everywhere."),
    "torn.png": (png("red", 300, 300)[:-30], "torn.png is torn: a part of the file is missing."),
    "stump.png": (png("red")[:20], "stump.png is damaged."),
}


def test_what_can_not_be_used_is_refused_in_plain_words_and_never_sent(
    serve: Serve, open_page: OpenPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [name for name in routes.FORMATS if name != "HEIF"]
    monkeypatch.setattr(routes, "FORMATS", read)  # as where the extra for HEIC is not installed
    service = FakeService()
    page = open_page(serve(service, ServerSettings(names=("Qwen3-VL-4B",))))
    expect(page.locator("#model-facts")).to_contain_text("512 tokens")
    for name, (data, _) in REFUSED.items():
        (tmp_path / name).write_bytes(data)
    Image.new("1", (20_000, 12_000)).save(tmp_path / "map.png")
    with (tmp_path / "huge.png").open("wb") as file:
        file.write(png("red"))
        file.truncate(MediaSettings().image.max_bytes + 1)
    (tmp_path / "good.png").write_bytes(png("blue"))
    page.set_input_files("#file", [tmp_path / name for name in (*REFUSED, "map.png", "huge.png", "good.png")])
    expect(page.locator("#picture-facts")).to_contain_text("good.png")  # the last, and the only one taken
    expect(page.locator("#tray li")).to_have_count(1)
    error = page.locator("#picture-error")
    count = len(REFUSED) + 2
    expect(error).to_contain_text(f"{count} of {count + 1} files were not taken.")
    for _, words in REFUSED.values():
        expect(error).to_contain_text(words)
    expect(error).to_contain_text("map.png has too many pixels: 20,000 × 12,000 are 240 million.")
    expect(error).to_contain_text("This server takes up to 64 million.")
    expect(error).to_contain_text(
        "huge.png is too large: 67.1 MB. This server takes pictures of up to 67.1 MB."
    )
    assert service.requests == []


SLOWLY = """() => {
    const check = window.createImageBitmap;
    window.createImageBitmap = (file) => new Promise((done) => { window.goOn = () => done(check(file)); });
}"""


def test_a_question_waits_for_its_pictures(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    service = FakeService()
    page = open_page(serve(service, ServerSettings(names=("Qwen3-VL-4B",))))
    page.evaluate(SLOWLY)
    (tmp_path / "blue.png").write_bytes(png("blue"))
    (tmp_path / "torn.png").write_bytes(png("red", 300, 300)[:-30])
    page.set_input_files("#file", tmp_path / "blue.png")
    until(lambda: page.evaluate("() => Boolean(window.goOn)"))
    ask(page, "What is it?")
    expect(page.locator("#ask-form")).to_have_attribute("aria-busy", "true")
    assert service.requests == []
    page.evaluate("() => { goOn(); goOn = null; }")
    expect(answers(page)).to_have_count(1)
    assert colors(service.requests[0].messages[0]) == [(0, 0, 255)]
    page.set_input_files("#file", tmp_path / "torn.png")
    until(lambda: page.evaluate("() => Boolean(window.goOn)"))
    ask(page, "And this?")
    page.evaluate("() => goOn()")
    expect(page.locator("#ask-form .error")).to_contain_text(
        "The question was not sent, because a file was refused"
    )
    expect(page.get_by_label("Question")).to_have_value("And this?")
    assert len(service.requests) == 1


def test_limits_are_those_of_the_server() -> None:
    with live(FakeService(), ServerSettings(max_body_bytes=12_345, api_keys=("right",))) as base:
        known = httpx.get(f"{base}/page/limits.json").json()
    intake = MediaSettings()
    assert known["body_bytes"] == 12_345
    assert known["picture_bytes"] == intake.image.max_bytes
    assert known["picture_pixels"] == intake.image.max_pixels
    assert known["video_bytes"] == intake.video.max_bytes
    assert known["formats"] == list(FORMATS)


def test_pictures_that_are_too_much_together_are_not_sent(
    serve: Serve, open_page: OpenPage, tmp_path: Path
) -> None:
    service = FakeService()
    page = open_page(serve(service, ServerSettings(max_body_bytes=20_000)))
    for name in ("one.bmp", "two.bmp"):
        Image.new("RGB", (64, 64)).save(tmp_path / name)  # 12 kB each
    choose(page, tmp_path / "one.bmp")
    ask(page, "What is it?")
    expect(answers(page)).to_have_count(1)
    choose(page, tmp_path / "two.bmp")
    ask(page, "And this?")
    expect(page.locator("#ask-form .error")).to_contain_text(
        "The pictures of this conversation are 25 kB together, and this server takes 20 kB at once."
    )
    expect(page.get_by_label("Question")).to_have_value("And this?")
    expect(page.get_by_role("button", name="Remove two.bmp")).to_be_visible()  # it waits again
    assert len(service.requests) == 1


def test_without_its_limits_the_server_decides(
    url: str, open_page: OpenPage, shapes: Path, problems: list[str]
) -> None:
    page = open_page(url)
    page.route("**/page/limits.json", lambda route: route.abort())
    choose(page, shapes)
    provoked(problems, "ERR_FAILED")


def film(path: Path) -> None:
    """Four frames as MP4."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width = stream.height = 32
        for color in ("red", "green", "blue", "white"):
            for packet in stream.encode(av.VideoFrame.from_image(Image.new("RGB", (32, 32), color))):
                container.mux(packet)
        container.mux(stream.encode())


def test_a_video_is_asked_about(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    (tmp_path / "moves.gif").write_bytes(animation())
    film(tmp_path / "clip.mp4")
    service = FakeService(capabilities=SEES_VIDEO)
    page = open_page(serve(service))
    expect(page.locator("#model-facts")).to_contain_text("512 tokens")
    for count, name in enumerate(("clip.mp4", "moves.gif"), 1):
        choose(page, tmp_path / name)
        expect(page.locator("#picture-facts")).to_contain_text("32 × 32 px" if count == 2 else "· video ·")
        ask(page, "What happens?")
        expect(answers(page)).to_have_count(count)
    first, _, second = service.requests[-1].messages
    for message in (first, second):
        (video,) = [part for part in message.content if isinstance(part, Video)]
        assert len(video.frames) >= 3
    expect(page.locator("#motion")).to_contain_text("questions, Caption and Scene send its frames")


def shapes_of(request: Request) -> list[str | int]:
    """What a model is shown and told: words, frames of a video, or "picture"."""
    return [
        part.text if isinstance(part, Text) else len(part.frames) if isinstance(part, Video) else "picture"
        for message in request.messages
        for part in message.content
    ]


@pytest.mark.parametrize("video", [False, True], ids=["pictures", "videos"])
@pytest.mark.sample("videos")
def test_a_conversation_that_is_taken_away_means_the_same(
    serve: Serve, open_page: OpenPage, tmp_path: Path, shapes: Path, video: bool
) -> None:
    """The JSON of the list of conversations, sent as it is with one more question."""
    service = FakeService(capabilities=replace(CAPABILITIES, video=video))
    url = serve(service)
    page = open_page(url)
    expect(page.locator("#model-facts")).to_contain_text("512 tokens")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be short.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Temperature").press("Enter")
    expect(page.get_by_role("dialog")).to_be_hidden()
    (tmp_path / "moves.gif").write_bytes(animation())
    (tmp_path / "moves.webp").write_bytes(moving("WEBP"))
    files = [shapes, tmp_path / "moves.gif", tmp_path / "moves.webp"]
    if video:
        film(tmp_path / "clip.mp4")
        files.append(tmp_path / "clip.mp4")
    for file in files[:2]:
        choose(page, file)
    ask(page, "First?")
    expect(answers(page)).to_have_count(1)
    for file in files[2:]:
        choose(page, file)
    ask(page, "Second?")
    expect(answers(page)).to_have_count(2)
    page.evaluate(ALL_WRITTEN)
    page.get_by_role("button", name="Conversations", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON of First?").click()
    page.keyboard.press("Escape")
    ask(page, "Third?")
    expect(answers(page)).to_have_count(3)
    body = json.loads(Path(download.value.path()).read_text("utf-8"))
    body["messages"].append({"role": "user", "content": "Third?"})
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    asked, again = service.requests[-2:]
    assert shapes_of(again) == shapes_of(asked)
    assert shapes_of(again).count("picture") == (1 if video else 3)
    assert again.sampling.temperature == asked.sampling.temperature == 0.5
    assert [each["kind"] for each in body["pictures"]] == ["picture"] * 3 + ["video"] * video


def test_caption_and_scene_take_a_video_and_detect_says_why_not(
    serve: Serve, open_page: OpenPage, tmp_path: Path, shapes: Path
) -> None:
    """As the command line, Python and the server do."""
    scene = '{"summary": "Red.", "setting": "", "objects": [], "text": [], "relations": []}'
    service = FakeService(Script((scene,)), capabilities=SEES_VIDEO)
    page = open_page(serve(service))
    expect(page.locator("#model-facts")).to_contain_text("512 tokens")
    film(tmp_path / "clip.mp4")
    choose(page, tmp_path / "clip.mp4")
    expect(page.locator("#film")).to_contain_text("Detect needs a still picture")
    tab(page, "Caption")
    page.get_by_role("button", name="Caption the picture").click()
    expect(page.locator("#caption-form .job-status")).to_contain_text("tokens read")
    tab(page, "Scene")
    page.get_by_role("button", name="Analyse").click()
    expect(page.locator("#scene-result")).to_contain_text("Red.")
    for request in service.requests:
        assert isinstance(request.messages[-1].content[0], Video)
    tab(page, "Detect")
    page.get_by_role("button", name="Find objects").click()
    why = "clip.mp4 is a video, and boxes belong to one picture."
    expect(page.locator("#detect-form .error")).to_contain_text(why)
    service.script = Script(('[{"bbox_2d": [100, 100, 600, 900], "label": "cat"}]',))
    choose(page, shapes)
    expect(page.locator("#scope-all")).to_have_text("All 2")
    page.get_by_role("button", name="Find objects").click()
    expect(page.locator("#detect-summary")).to_contain_text("found")
    expect(page.locator("#detect-blocks .error")).to_contain_text(why)
    assert len(service.requests) == 3


def test_a_film_is_refused_where_the_model_never_learned_any(
    serve: Serve, open_page: OpenPage, tmp_path: Path
) -> None:
    """As the command line refuses to show one to pocket."""
    page = open_page(serve(FakeService(capabilities=UNLEARNED_VIDEO)))
    expect(page.locator("#model-facts")).to_contain_text("512 tokens")
    film(tmp_path / "clip.mp4")
    page.set_input_files("#file", tmp_path / "clip.mp4")
    expect(page.locator("#picture-error")).to_contain_text("this model does not understand videos")


def moving(kind: str, **options: Any) -> bytes:
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "green")]
    file = BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], duration=500, **options)
    return file.getvalue()


def test_an_animation_is_known_whether_it_repeats_or_not(
    serve: Serve, open_page: OpenPage, tmp_path: Path
) -> None:
    page = open_page(serve(FakeService()))
    files = {
        "once.gif": moving("GIF"),
        "forever.gif": moving("GIF", loop=0),
        "moving.webp": moving("WEBP"),
        "moving.png": moving("PNG"),
    }
    assert b"NETSCAPE" not in files["once.gif"]
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        choose(page, tmp_path / name)
        expect(page.locator("#motion"), name).to_have_text(
            "An animation: its first frame is sent, because this model does not understand videos."
        )
    for kind in ("GIF", "WEBP", "PNG"):
        path = tmp_path / f"still.{kind.lower()}"
        Image.new("RGB", (32, 32)).save(path)
        choose(page, path)
        expect(page.locator("#motion"), kind).to_be_hidden()


def test_an_animation_chosen_before_the_model_is_known_is_described_again(
    serve: Serve, open_page: OpenPage, tmp_path: Path
) -> None:
    page = open_page("about:blank#")
    with model_unknown(page):
        page.goto(f"{serve(FakeService())}/")
        (tmp_path / "once.gif").write_bytes(moving("GIF"))
        choose(page, tmp_path / "once.gif")
        expect(page.locator("#motion")).to_contain_text("send its frames")
    expect(page.locator("#motion")).to_contain_text("this model does not understand videos")


# The bytes of every file that is sent: a browser tells them nobody else.
RECORD = """() => {
    const real = window.fetch;
    window.sent = [];
    window.fetch = async (path, options) => {
        for (const [, file] of options?.body instanceof FormData ? options.body : []) {
            if (file instanceof Blob) window.sent.push([...new Uint8Array(await file.arrayBuffer())]);
        }
        return real(path, options);
    };
}"""


def sent(page: Page) -> list[bytes]:
    return [bytes(each) for each in page.evaluate("() => window.sent")]


@pytest.mark.parametrize(
    ("capabilities", "video"),
    [(CAPABILITIES, False), (UNLEARNED_VIDEO, False), (SEES_VIDEO, True)],
    ids=["pictures", "never learned videos", "videos"],
)
@pytest.mark.sample("pictures")
def test_an_animation_goes_as_it_is(
    serve: Serve, open_page: OpenPage, tmp_path: Path, capabilities: Capabilities, video: bool
) -> None:
    """Where the model takes no video, or learned none, the server looks at the first frame, and says so."""
    scene = '{"summary": "Red.", "setting": "", "objects": [], "text": [], "relations": []}'
    service = FakeService(Script((scene,)), capabilities=capabilities)
    page = open_page(serve(service))
    expect(page.locator("#model-facts")).to_contain_text("512 tokens")
    page.evaluate(RECORD)
    (tmp_path / "moves.gif").write_bytes(animation())
    choose(page, tmp_path / "moves.gif")
    note = "moves.gif is animated (3 frames): only its first frame was looked at"
    ask(page, "What is it?")
    expect(answers(page)).to_have_count(1)
    assert sent(page)[-1] == animation()
    expect(page.locator("#transcript")).to_contain_text("Red." if video else note)
    tab(page, "Caption")
    page.get_by_role("button", name="Caption the picture").click()
    expect(page.locator("#caption-result")).to_contain_text("Red.")
    tab(page, "Scene")
    page.get_by_role("button", name="Analyse").click()
    expect(page.locator("#scene-result")).to_contain_text("Red.")
    expect(page.locator("#scene-form .job-status")).to_contain_text("tokens read" if video else note)
    assert sent(page)[-1] == animation()
    assert len(service.requests) == 3
    for request in service.requests:
        (shown,) = [p for p in request.messages[-1].content if isinstance(p, Picture | Video)]
        if video:
            assert isinstance(shown, Video), request
            assert len(shown.frames) >= 3
        else:
            assert isinstance(shown, Picture), request
            assert shown.image.getpixel((0, 0)) == (255, 0, 0)


def test_boxes_are_over_a_still_and_what_is_missing_is_named(page_of: PageOf, tmp_path: Path) -> None:
    box = '[{"bbox_2d": [100, 100, 600, 900], "label": "Red cat"}]'
    page = page_of(FakeService(Script((box,))))
    (tmp_path / "moves.gif").write_bytes(animation())
    choose(page, tmp_path / "moves.gif")
    tab(page, "Detect")
    page.get_by_label("What to look for").fill("cat, cup, dog")
    page.get_by_role("button", name="Find objects").click()
    expect(page.locator("#detect-blocks p")).to_have_text(["cup not found", "dog not found"])
    image = page.locator("#image")
    expect(image).to_have_attribute("src", re.compile("^data:image/png"))
    data = str(image.get_attribute("src")).partition(",")[2]
    still = Image.open(BytesIO(base64.b64decode(data)))
    assert still.convert("RGB").getpixel((0, 0)) == (255, 0, 0)
    page.get_by_role("button", name="Hide the boxes").click()
    expect(image).to_have_attribute("src", re.compile("^blob:"))
    (tmp_path / "blue.png").write_bytes(png("blue"))
    choose(page, tmp_path / "blue.png")
    page.get_by_role("button", name="Find objects").click()
    expect(page.locator("#detect-blocks img").first).to_have_attribute("src", re.compile("^data:image/png"))
    tab(page, "Caption")
    expect(page.get_by_role("button", name="Caption 2 pictures")).to_be_visible()
    page.locator("#one").check()
    expect(page.get_by_role("button", name="Caption the picture")).to_be_visible()


HEIC = b"\0\0\0\x1cftypmif1\0\0\0\0mif1heic" + bytes(64)  # no browser here draws any


def test_what_this_browser_can_not_draw_goes_as_it_is(
    serve: Serve, open_page: OpenPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "FORMATS", (*routes.FORMATS, "HEIF"))  # as where it is read
    page = open_page(serve(FakeService()))
    page.evaluate(RECORD)

    def found(route: Route) -> None:
        box = {"x1": 100, "y1": 100, "x2": 300, "y2": 200}
        things = {"width": 400, "height": 300, "objects": [{"label": "cat", "box": box}]}
        route.fulfill(json=things | {"truncated": False, "usage": None})

    page.route("**/v1/vision/detect", found)
    accepted = page.locator("#file").get_attribute("accept") or ""
    assert {".heic", ".heif"} <= set(accepted.split(","))
    Image.new("RGB", (40, 30)).save(tmp_path / "scan.tiff")
    (tmp_path / "IMG_1.HEIC").write_bytes(HEIC)
    for name, sign in (("scan.tiff", "TIFF"), ("IMG_1.HEIC", "HEIC")):
        choose(page, tmp_path / name)
        expect(page.locator("#film")).to_contain_text(f"{name} can't be shown by this browser.")
        expect(page.locator("#frame")).to_be_hidden()
        expect(page.locator("#tray li .film-sign").last).to_have_text(sign)
    detect(page)
    expect(page.locator("#detect-blocks .boxed .film-sign")).to_have_text(["TIFF", "HEIC"])
    expect(page.locator("#detect-blocks .boxed .box")).to_have_count(2)  # where they are, on a sign
    expect(page.get_by_role("button", name="Download as PNG")).to_have_count(0)  # there are no pixels here
    assert sent(page)[-1] == HEIC
    (tmp_path / "broken.avif").write_bytes(b"\0\0\0\x18ftypmif1\0\0\0\0avif" + bytes(64))
    choose(
        page, tmp_path / "broken.avif"
    )  # a newer AVIF than this browser's, or a damaged one: the server knows
    expect(page.locator("#tray li .film-sign").last).to_have_text("AVIF")


def test_phones_are_told_nothing_of_keys(url: str, open_page: OpenPage) -> None:
    hints = ("Enter asks", "paste it")
    page = open_page(url)
    for text in hints:
        expect(page.get_by_text(text)).to_be_visible()
    page.set_viewport_size({"width": 390, "height": 844})
    tablet = open_page(url, 1024, 844, has_touch=True, is_mobile=True)
    for text in hints:
        expect(page.get_by_text(text)).to_be_hidden()
        expect(tablet.get_by_text(text)).to_be_hidden()
