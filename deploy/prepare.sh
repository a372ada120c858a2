#!/bin/sh
# Write an example federation of four hospitals into OUT: a folder for the coordinator and one for every silo, with
# files, certificates and startup kits; all operators agree. sh prepare.sh OUT
#
# SERVER_HOST is the server's name as silos see it (coordinator), SERVER_PORT its port (the next one is FLARE's own); PART_OWNER, if
# set, gets all of it.
set -eu
umask 077  # there are private keys in all of it
out=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
home=$work/coordinator
scaffpd deploy local "$home" --write
sed -i "1i server = \"${SERVER_HOST:-coordinator}:${SERVER_PORT:-8002}\"" "$home/federation.toml"
scaffpd deploy provision "$home" > "$work/said" || { cat "$work/said"; exit 1; }
rm -r "$home/authority"  # an example has no silo to add
for name in cleveland hungarian switzerland va; do mv "$home/$name" "$work"; done
for name in coordinator cleveland hungarian switzerland va; do
    test ! -e "$out/$name/kit" || { echo "$out/$name has a startup kit already." >&2; exit 1; }
    mkdir -p "$out/$name"
    chmod 700 "$out/$name"  # a volume is there already
    cp -R "$work/$name/." "$out/$name/"
    test -z "${PART_OWNER:-}" || chown -R "$PART_OWNER" "$out/$name"
done
echo "Written to $out: $(ls "$out" | tr "\n" " ")"
