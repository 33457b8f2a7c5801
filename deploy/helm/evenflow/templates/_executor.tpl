{{/* Of [root, pool]. */}}
{{- define "evenflow.executorContainer" -}}
{{- $root := index . 0 }}
{{- $pool := index . 1 }}
{{- $name := include "evenflow.name" $root }}
{{- $address := include "evenflow.poolName" (list $root $pool.name) }}
{{- $isGpu := eq $pool.device "gpu" -}}
- name: executor
  image: {{ include "evenflow.image" (list $root ($isGpu | ternary "executor-cuda" "executor-cpu")) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [python, -m, services.executor]
  {{- include "evenflow.containerSecurity" $root | nindent 2 }}
  env:
    - name: EVENFLOW_EXECUTOR_ID
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - {name: EVENFLOW_EXECUTOR_ADVERTISED_ADDRESS, value: "$(EVENFLOW_EXECUTOR_ID).{{ $address }}:50051"}
    {{- include "evenflow.commonEnv" (list $root "executor" "gateway") | nindent 4 }}
    - {name: EVENFLOW_EXECUTOR_TRACKER, value: {{ $root.Values.tracker.enabled | ternary (printf "%s-tracker:50053" $name) "" | quote }}}
    - {name: EVENFLOW_EXECUTOR_PLANNER_ADDRESS, value: {{ $root.Values.planner.enabled | ternary (printf "dns:///%s-planner:50052" $name) "" | quote }}}
    - {name: EVENFLOW_EXECUTOR_DRAIN_TIMEOUT_S, value: {{ $pool.drainSeconds | quote }}}
    - {name: EVENFLOW_EXECUTOR_MODEL, value: {{ $pool.model | quote }}}
    {{- with $pool.servedModelName }}
    - {name: EVENFLOW_EXECUTOR_SERVED_MODEL_NAME, value: {{ . | quote }}}
    {{- end }}
    - {name: EVENFLOW_EXECUTOR_TENSOR_PARALLEL_SIZE, value: {{ $pool.tensorParallelSize | quote }}}
    - {name: EVENFLOW_EXECUTOR_PIPELINE_PARALLEL_SIZE, value: {{ $pool.pipelineParallelSize | quote }}}
    - {name: EVENFLOW_EXECUTOR_LAYERWISE_KV, value: {{ $pool.layerwiseKv | quote }}}
    - {name: EVENFLOW_EXECUTOR_KV_HOST_MEMORY_BYTES, value: {{ include "evenflow.scalar" $pool.kvHostMemoryBytes | quote }}}
    {{- with $pool.kvEvents.port }}
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    - {name: EVENFLOW_EXECUTOR_KV_EVENTS_ENDPOINT, value: "tcp://*:{{ . }}"}
    - {name: EVENFLOW_EXECUTOR_KV_EVENTS_TOPIC, value: {{ $pool.kvEvents.topic | default (printf "kv@$(POD_IP):8000@%s" ($pool.servedModelName | default (base $pool.model))) | quote }}}
    {{- end }}
    {{- with $pool.hubTokenSecret }}
    {{- if .name }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
    {{- end }}
    {{- end }}
    {{- with include "evenflow.settings" (list "executor" $pool.settings) }}{{ . | trim | nindent 4 }}{{- end }}
  ports:
    - {name: engine-grpc, containerPort: 50051}
    - {name: engine-metrics, containerPort: 9051}
    {{- with $pool.kvEvents.port }}
    - {name: kv-events, containerPort: {{ . }}}
    {{- end }}
  startupProbe:
    {{- include "evenflow.healthProbe" (list $root 50051) | nindent 4 }}
    failureThreshold: {{ divf $pool.startupSeconds 10 | ceil | int }}
  livenessProbe:
    {{- include "evenflow.healthProbe" (list $root 50051) | nindent 4 }}
    failureThreshold: 6
  # Also what takes it out of the pool's name in the DNS.
  readinessProbe:
    {{- include "evenflow.healthProbe" (list $root 50051) | nindent 4 }}
    failureThreshold: 2
  {{- $resources := deepCopy $pool.resources }}
  {{- if $isGpu }}
  {{- $resources = mergeOverwrite $resources (dict "limits" (dict "nvidia.com/gpu" (int $pool.gpus))) }}
  {{- end }}
  resources: {{ toJson $resources }}
  volumeMounts:
    {{- include "evenflow.mounts" (list $root "executor") | nindent 4 }}
    - {name: shared-memory, mountPath: /dev/shm}
    {{- if $pool.modelVolume }}
    - {name: models, mountPath: /models, readOnly: true}
    {{- end }}
    {{- if $pool.hubVolume }}
    - {name: hub, mountPath: /home/evenflow/.cache/huggingface}
    {{- end }}
{{- end }}
