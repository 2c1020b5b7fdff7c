"""Parsers of /proc, on lines as the kernel writes them."""

from vllm_supervisor.core.proc import ProcessId, command_words, has_variables, parse_stat, title, variable

LINE = (
    b"4711 (VLLM::EngineCor) %b 12 4711 4710 0 -1 4194560 5034 0 0 0 150 50 7 8 20 0 %b 0 98765 4288000 1500 "
    b"18446744073709551615 1 1 0 0 0 0 0 16781312 134352898 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
)


def test_a_stat_line_is_read() -> None:
    """Pid, start, parent, group, session, threads, processor time and memory come from their columns."""
    stat = parse_stat(LINE % (b"S", b"9"))
    assert stat.id == ProcessId(4711, 98765)
    assert (stat.comm, stat.state, stat.ppid, stat.pgid, stat.sid) == ("VLLM::EngineCor", "S", 12, 4711, 4710)
    assert (stat.threads, stat.cpu_ticks, stat.rss_pages) == (9, 200, 1500)


def test_a_name_may_hold_anything() -> None:
    """Spaces, parentheses and broken UTF-8 in a name do not shift the columns."""
    stat = parse_stat((LINE % (b"S", b"1")).replace(b"VLLM::EngineCor", b"a) S 1 (\xff"))
    assert (stat.comm, stat.ppid) == ("a) S 1 (\ufffd", 12)


def test_a_zombie_is_dead_only_without_threads() -> None:
    """A zombie leader whose threads run on still holds everything."""
    assert parse_stat(LINE % (b"Z", b"1")).dead
    assert not parse_stat(LINE % (b"Z", b"2")).dead
    assert not parse_stat(LINE % (b"D", b"1")).dead


def test_variables_are_whole_entries() -> None:
    """A value that merely begins alike, or stands inside another, is no match."""
    environ = b"A=1\0VSUP_RUN=abc\0X=VSUP_RUN=zzz\0"
    assert has_variables(environ, [("VSUP_RUN", "abc"), ("A", "1")])
    assert not has_variables(environ, [("VSUP_RUN", "ab")])
    assert not has_variables(environ, [("VSUP_RUN", "zzz")])
    assert not has_variables(b"", [("VSUP_RUN", "abc")])
    assert variable(environ, "VSUP_RUN") == "abc"
    assert variable(environ, "VSUP") is None


def test_variables_need_not_be_utf_8() -> None:
    """A value that is no UTF-8, as a home directory may be, is found and read as the bytes it is."""
    value = b"/home/j\xfcrgen".decode("utf-8", "surrogateescape")
    environ = b"A=1\0B=/home/j\xfcrgen\0"
    assert variable(environ, "B") == value
    assert has_variables(environ, [("A", "1"), ("B", value)])
    assert not has_variables(environ, [("B", "/home/jrgen")])


def test_a_cut_title_is_made_whole() -> None:
    """The kernel cuts names at 15 bytes; a title in the command line completes them, a path does not."""
    assert title("VLLM::EngineCor", b"VLLM::EngineCore\0\0\0") == "VLLM::EngineCore"
    assert title("vllm", b"/usr/bin/python3\0/usr/bin/vllm\0serve\0") == "vllm"
    assert title("kworker", b"") == "kworker"


def test_a_command_shows_two_words_and_no_option() -> None:
    """Program and first argument are shown, options and all that follows are not, whatever bytes they hold."""
    assert (
        command_words("python3", b"/usr/bin/python3\0/opt/watchdog.py\0--api-key\0secret\0")
        == "python3 /opt/watchdog.py"
    )
    assert command_words("curl", b"curl\0-Hsecret\0") == "curl"
    assert command_words("kthreadd", b"") == "kthreadd"
    assert command_words("x", b"a\x1b[31m\nb\0") == "a?[31m b"
    assert len(command_words("x", b"y" * 500)) == 80
