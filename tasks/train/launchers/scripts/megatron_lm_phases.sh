# Megatron-LM ends at each transition; the next run goes on from its checkpoint with the blend of the next phase.
ends=(@ends@)
blends=(@blends@)
for phase in "${!ends[@]}"; do
    finished="$(cat @tracker@ 2>/dev/null || echo 0)"
    if [[ "$finished" =~ ^[0-9]+$ && "$finished" -ge "${ends[$phase]}" ]]; then continue; fi
    python @torchrun@ @peer@ "$program" --per-split-data-args-path "${blends[$phase]}" \
        @expanded@ "$@"
done
