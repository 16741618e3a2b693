#!/bin/sh
# Unpack Debian packages below a folder, on a Debian machine, without installing anything.
#   debian_tools.sh FOLDER PACKAGE[/RELEASE]...
# A package comes from this machine's release, or from RELEASE at the same mirror. Dependencies are
# not resolved: name all packages. Binaries are then in FOLDER/usr/bin. A second run with the same
# packages has no effect. Changes neither apt's lists nor its settings. Exit status 77: not possible
# on this machine; the reason is on stderr.
set -eu
[ $# -ge 2 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift

cannot() {
    echo "debian_tools: $1" >&2
    exit 77
}

wanted=$(printf '%s\n' "$@" | sort)
[ "$wanted" != "$(cat "$folder/.packages" 2>/dev/null || true)" ] || exit 0
for tool in apt-get dpkg flock; do
    command -v "$tool" >/dev/null || cannot "no $tool here: these tools come as Debian packages"
done
exec 9>"$folder/.lock"
flock -w 900 9 || cannot "another run has held $folder/.lock for 15 minutes"
[ "$wanted" != "$(cat "$folder/.packages" 2>/dev/null || true)" ] || exit 0

apt=$folder/.apt
mkdir -p "$apt/sources" "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/debs"
etc=${APT_FOLDER:-/etc/apt}
sources=$etc/sources.list.d/debian.sources
[ -r "$sources" ] || [ -r "$etc/sources.list" ] || cannot "no sources of Debian packages in $etc"
# Lists of this machine's release, only if a package comes from it.
for package in "$@"; do
    case $package in */*) continue ;; esac
    [ ! -r "$sources" ] || cp "$sources" "$apt/sources/"
    [ -r "$sources" ] || cp "$etc/sources.list" "$apt/sources/here.list"
done

# The source of a release at Debian's mirror, without updates.
source_of() {
    if [ -r "$sources" ]; then
        awk -v RS= 'NR == 1 { first = $0 }
            /(^|\n)URIs:[^\n]*\/debian\/?( |\n|$)/ { first = $0; exit } END { print first }' "$sources" |
            sed "s/^Suites:.*/Suites: $1/"
        return
    fi
    mirror=$(sed -n 's#^deb \(\[[^]]*\] *\)\{0,1\}\([^ ]*/debian/\{0,1\}\) .*#\2#p' "$etc/sources.list")
    [ -n "$mirror" ] || return 1
    printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\n' "${mirror%%
*}" "$1"
}

: >"$apt/preferences"
for release in $(printf '%s\n' "$@" | sed -n 's,^[^/]*/,,p' | sort -u); do
    source_of "$release" >"$apt/sources/$release.sources" || cannot "apt has no Debian mirror here"
    printf 'Package: *\nPin: release n=%s\nPin-Priority: 100\n\n' "$release" >>"$apt/preferences"
done
private="-o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=$apt/sources
    -o Dir::Etc::Preferences=$apt/preferences -o Dir::Etc::PreferencesParts=/dev/null
    -o Dir::State::Lists=$apt/lists -o Dir::Cache=$apt/cache -o APT::Sandbox::User=root
    -o Acquire::Languages=none -o Acquire::Retries=3 -o Acquire::http::Timeout=30"
# shellcheck disable=SC2086
apt-get -qq $private update || cannot "the lists of Debian packages cannot be fetched"
# shellcheck disable=SC2086
(cd "$apt/debs" && apt-get -qq $private download "$@") || cannot "the packages cannot be fetched: $*"
for package in "$apt"/debs/*.deb; do
    dpkg -x "$package" "$folder"
done
rm -rf "$apt"
echo "$wanted" >"$folder/.packages"
